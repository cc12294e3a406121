from pathlib import Path

APP = Path("/app")

EXPECTED = {
    "img_003.jpg": "picture 3\n",
    "img_012.jpg": "picture 12\n",
    "img_045.jpg": "picture 45\n",
    "notes.TXT": "keep\n",
    "sub/img_7.jpg": "deep\n",
    "trip_(1).jpg": "trip\n",
}

folder = APP / "photos"
found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
assert found == EXPECTED, found
