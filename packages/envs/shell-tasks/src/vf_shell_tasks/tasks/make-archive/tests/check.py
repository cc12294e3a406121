import tarfile
from pathlib import Path

APP = Path("/app")

EXPECTED = {"index.md": b"# Index\n", "guide/start.md": b"# Start\n", "guide/more tips.md": b"# Tips\n"}

assert (APP / "docs.tar.gz").read_bytes()[:2] == b"\x1f\x8b", "not compressed by gzip"
with tarfile.open(APP / "docs.tar.gz", "r:gz") as archive:
    members = archive.getmembers()
    assert all(member.isfile() for member in members), [member.name for member in members]
    found = {member.name: archive.extractfile(member).read() for member in members}
assert found == EXPECTED, found
assert len(members) == 3
