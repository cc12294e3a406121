from pathlib import Path

APP = Path("/app")

KEPT = ["B.txt", "a/1.txt", "a/empty", "b/2.txt", "b/empty", "d/x y.txt"]
DELETED = ["b/1.txt", "c.txt", "d/z.txt", "e.txt"]

folder = APP / "pool"
found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
assert found == KEPT, found
assert (APP / "deleted.txt").read_text().splitlines() == DELETED
assert (folder / "B.txt").read_text() == "blue\n"
