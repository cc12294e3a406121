"""Archives of strangers and sandboxes: nothing outside their folder changes, and what they unpack
to is bounded."""

import contextlib
import gzip
import io
import lzma
import os
import shutil
import stat
import tarfile
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verifiers.sandbox.unpacking import (
    MAX_HEADER,
    Budget,
    Stream,
    decompressed,
    unpack,
    unpack_sent,
)

PLENTY = 2**30
FILE, FOLDER, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def member(name, kind=FILE, target="", content=b"", mode=0o777, **fields):
    header = tarfile.TarInfo(name)
    header.type, header.linkname, header.mode, header.size = kind, target, mode, len(content)
    for key, value in fields.items():
        setattr(header, key, value)
    return header, content


def archive(*members, form=tarfile.PAX_FORMAT):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=form) as file:
        for header, content in members:
            file.addfile(header, io.BytesIO(content))
    return packed.getvalue()


def unpacked(content, folder, budget=PLENTY, is_layer=True):
    folder.mkdir(exist_ok=True)
    with decompressed(io.BytesIO(content)) as file:
        return unpack(Stream(file, Budget(budget)), folder, is_layer=is_layer)


def tree(folder):
    """Path -> (kind and mode, content or target) of all files, without following links."""
    facts = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.lstat()
        content = (
            os.readlink(path)
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else None
        )
        facts[str(path.relative_to(folder))] = (oct(status.st_mode), content)
    return facts


@contextlib.contextmanager
def outside():
    """A folder whose files must not change, with the folder to unpack into beside it; and a path to
    it in links."""
    top = Path(tempfile.mkdtemp(prefix="unpacking-"))
    try:
        (top / "host" / "folder").mkdir(parents=True, mode=0o700)
        (top / "host" / "flag").write_text("original")
        (top / "host" / "flag").chmod(0o600)
        (top / "into").mkdir()
        yield top
    finally:
        shutil.rmtree(top)


# --- nothing outside changes ----------------------------------------------------------------------


NAMES = st.sampled_from(
    "a b c a/b b/c a/../b ../host/flag /host/flag a/host/flag b/flag c/folder host/flag . ./a/ "
    ".wh.a a/.wh..wh..opq .wh.. .wh... b/.wh... .wh.".split()
)
TARGETS = st.sampled_from(
    ".. ../host ../host/flag ../host/folder /host TOP/host TOP/host/flag a b c . / a/.. b/flag".split()
)
KINDS = st.sampled_from([FILE, FOLDER, LINK, HARD, tarfile.CHRTYPE, tarfile.FIFOTYPE])
MEMBERS = st.lists(
    st.tuples(NAMES, KINDS, TARGETS, st.sampled_from([0o777, 0o4755, 0])), min_size=1, max_size=7
)
LINK_INSTEAD_OF_A_FOLDER = [("a", FOLDER, "", 0o777), ("a", LINK, "TOP/host/flag", 0o777)]
THROUGH_A_PARENT = [
    ("a", FOLDER, "", 0o755),
    ("a/folder", FOLDER, "", 0o777),
    ("a", LINK, "TOP/host", 0o777),
]
BY_A_HARD_LINK = [
    ("a", LINK, "../host", 0o777),
    ("b", HARD, "a/flag", 0o777),
    ("b", FILE, "", 0o777),
]

BEHIND_A_LINK = [("b", LINK, "..", 0o777), ("b/c", LINK, "..", 0o777)]
"""The second lies in the root, by the first, which leads out and is left out."""


def hostile(members, top):
    return archive(
        *(
            member(
                name,
                kind,
                target.replace("TOP", str(top)),
                b"changed" if kind == FILE else b"",
                mode,
            )
            for name, kind, target, mode in members
        )
    )


@settings(max_examples=200, deadline=None)
@given(MEMBERS, st.booleans())
@example(LINK_INSTEAD_OF_A_FOLDER, True)
@example(THROUGH_A_PARENT, True)
@example(BY_A_HARD_LINK, False)
@example(BEHIND_A_LINK, False)
def test_nothing_outside_the_folder_changes(members, is_layer):
    with outside() as top:
        before = tree(top / "host")
        with contextlib.suppress(tarfile.TarError, OSError):
            unpacked(hostile(members, top), top / "into", is_layer=is_layer)
        assert tree(top / "host") == before
        assert sorted(os.listdir(top)) == ["host", "into"]
        for path in (top / "into").rglob("*"):
            status = path.lstat()
            assert (
                stat.S_ISREG(status.st_mode)
                or stat.S_ISDIR(status.st_mode)
                or stat.S_ISLNK(status.st_mode)
            )
            assert not status.st_mode & stat.S_ISUID
            if not is_layer and path.is_symlink():
                assert Path(os.path.realpath(path)).is_relative_to(top / "into"), (
                    "a kept link leads out"
                )


THROUGH_A_LINK = [("a", LINK, "TOP/host", 0o777), ("a/flag", FILE, "", 0o777)]


@pytest.mark.parametrize("members", [THROUGH_A_LINK, BY_A_HARD_LINK])
def test_negative_control_an_ordinary_extraction_changes_it(members):
    with outside() as top:
        before = tree(top / "host")
        with (
            contextlib.suppress(tarfile.TarError, OSError),
            tarfile.open(fileobj=io.BytesIO(hostile(members, top))) as file,
        ):
            if hasattr(tarfile, "fully_trusted_filter"):
                file.extraction_filter = tarfile.fully_trusted_filter
            file.extractall(top / "into")
        assert tree(top / "host") != before


def test_negative_control_a_mode_that_is_set_by_a_path_follows_the_link():
    with outside() as top:
        unpacked(hostile(LINK_INSTEAD_OF_A_FOLDER, top), top / "into")
        assert stat.S_IMODE((top / "host/flag").stat().st_mode) == 0o600
        os.chmod(top / "into/a", 0o777)
        assert stat.S_IMODE((top / "host/flag").stat().st_mode) == 0o777


def beyond_the_longest_path(folder, name, content):
    """An archive that defeats the filters of ``tarfile`` before Python 3.11.13 and 3.12.11
    (CVE-2025-4517)."""
    long, steps, path, members = "d" * 247, "abcdefghijklmnop", "", []
    for step in steps:
        members.append(member(f"{path}{long}", FOLDER, mode=0o755))
        members.append(member(f"{path}{step}", LINK, long))
        path += f"{long}/"
    link = "/".join(steps) + "/" + "l" * 254
    members.append(member(link, LINK, "../" * len(steps)))
    members.append(member("escape", LINK, f"{link}/../../../../../../..{folder}"))
    members += [member("x", HARD, f"escape/{name}"), member("x", content=content)]
    return archive(*members)


def test_names_beyond_the_longest_path_lead_nowhere():
    with outside() as top:
        attack = beyond_the_longest_path(top / "host", "flag", b"changed")
        for is_layer in (True, False):
            with contextlib.suppress(tarfile.TarError, OSError):
                unpacked(attack, top / f"into-{is_layer}", is_layer=is_layer)
            assert (top / "host/flag").read_text() == "original"


def test_negative_control_they_defeat_the_filters_of_an_older_python():
    with outside() as top:
        with (
            contextlib.suppress(tarfile.TarError, OSError),
            tarfile.open(
                fileobj=io.BytesIO(beyond_the_longest_path(top / "host", "flag", b"changed"))
            ) as file,
        ):
            if not hasattr(tarfile, "data_filter"):
                pytest.skip("this Python has no filters of archives")
            file.extractall(top / "into", filter="data")
        if (top / "host/flag").read_text() == "original":
            pytest.skip("the filters of this Python are mended")


# --- what is kept ---------------------------------------------------------------------------------


def test_files_folders_and_links_inside_are_kept_and_the_rest_is_named(tmp_path):
    members = [
        member("./", FOLDER),
        member("sub", FOLDER, mode=0o777),
        member("sub/file", content=b"text", mode=0o4666),
        member("sub/link", LINK, "../sub/file"),
        member("same", HARD, "sub/file"),
        member("out", LINK, "/etc"),
        member("up", LINK, "sub/../../other"),
        member("step", LINK, "sub"),
        member("far", LINK, "step/../.."),
        member("../above", content=b"x"),
        member("pipe", tarfile.FIFOTYPE),
    ]
    assert sorted(unpack_sent(archive(*members), tmp_path / "kept")) == [
        "../above",
        "far",
        "out",
        "up",
    ]
    assert tree(tmp_path / "kept") == {
        ".": (oct((tmp_path / "kept").lstat().st_mode), None),
        "sub": ("0o40755", None),
        "sub/file": ("0o100644", b"text"),
        "sub/link": ("0o120777", "../sub/file"),
        "same": ("0o100644", b"text"),
        "step": ("0o120777", "sub"),
    }


def test_a_folder_of_the_host_is_not_deleted_for_a_file_and_a_link_of_the_host_not_followed(
    tmp_path,
):
    (tmp_path / "host").mkdir()
    (tmp_path / "kept/data").mkdir(parents=True)
    (tmp_path / "kept/data/mine").write_text("mine")
    (tmp_path / "kept/there").symlink_to(tmp_path / "host/new")
    left_out = unpack_sent(
        archive(member("data"), member("there", content=b"x")), tmp_path / "kept"
    )
    assert left_out == ["data"]
    assert (tmp_path / "kept/data/mine").read_text() == "mine"
    assert (tmp_path / "kept/there").read_bytes() == b"x"
    assert os.listdir(tmp_path / "host") == []


def test_a_layer_deletes_by_whiteouts_and_replaces(tmp_path):
    first = [
        member("a/b/old", content=b"x"),
        member("c", content=b"x"),
        member("d/e", content=b"x"),
    ]
    unpacked(archive(*first), tmp_path / "root")
    second = [
        member("a/.wh.b"),
        member("c/new", content=b"y"),
        member("d/.wh..wh..opq"),
        member("d/f"),
    ]
    with pytest.raises(tarfile.TarError, match=r"'c/new' lies in a file"):
        unpacked(archive(*second), tmp_path / "root")
    unpacked(archive(second[0], *second[2:], member("c", FOLDER), second[1]), tmp_path / "root")
    assert {path for path in tree(tmp_path / "root")} == {".", "a", "c", "c/new", "d", "d/f"}


@pytest.mark.parametrize("name", [".wh..", ".wh...", "a/.wh...", "a/.wh."])
def test_a_whiteout_does_not_delete_what_is_above(name, tmp_path):
    with pytest.raises(tarfile.TarError, match="leads out of the image"):
        unpacked(archive(member("a/b", content=b"x"), member(name)), tmp_path / "root")
    assert (tmp_path / "root/a/b").exists()


# --- damage ---------------------------------------------------------------------------------------

WHOLE = archive(
    *(member(f"folder/{number}", content=bytes([number]) * 700) for number in range(1, 20))
)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress], ids=["plain", "gzip", "xz"])
def test_an_archive_that_is_cut_anywhere_is_refused(pack, tmp_path):
    packed = pack(WHOLE)
    unpacked(packed, tmp_path / "whole")
    assert len(tree(tmp_path / "whole")) == 21
    needed = 19 * 1536 + 1024 if pack is bytes else len(packed)
    for cut in [*range(0, needed, needed // 60), needed - 513, needed - 1]:
        with pytest.raises(tarfile.TarError):
            unpacked(packed[:cut], tmp_path / "cut")


def test_negative_control_tarfile_takes_a_cut_for_the_end():
    with tarfile.open(fileobj=io.BytesIO(WHOLE[: 5 * 1536])) as file:
        assert len(file.getnames()) < 19


def test_a_damaged_header_is_refused_where_tarfile_takes_it_for_the_end(tmp_path):
    damaged = bytearray(WHOLE)
    damaged[3 * 1536 + 10] ^= 1
    with pytest.raises(tarfile.TarError, match="damaged"):
        unpacked(bytes(damaged), tmp_path / "root")
    with tarfile.open(fileobj=io.BytesIO(bytes(damaged))) as file:
        assert len(file.getnames()) < 19


def test_a_size_below_zero_and_a_member_that_repeats_for_ever_are_refused(tmp_path):
    header = bytearray(archive(member("a"))[:512])
    header[124:136] = b"\xff" * 8 + (-512).to_bytes(4, "big", signed=True)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    with pytest.raises(tarfile.TarError, match="below 0"):
        unpacked(bytes(header) + bytes(1024), tmp_path / "root")


# --- bombs ----------------------------------------------------------------------------------------


def peak_of(content, folder, **parameters):
    """Memory that refusing or unpacking an archive takes, in bytes."""
    tracemalloc.start()
    try:
        with contextlib.suppress(tarfile.TarError):
            unpacked(content, folder, **parameters)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_header_is_refused_before_it_is_read(tmp_path):
    header = archive(member("a", pax_headers={"comment": "x" * (64 * MAX_HEADER)}))
    packed = gzip.compress(header, 1)
    assert len(packed) < len(header) / 100
    with pytest.raises(tarfile.TarError, match="a header is longer than"):
        unpacked(packed, tmp_path / "root")
    assert peak_of(packed, tmp_path / "root") < 8 * MAX_HEADER


def test_headers_inside_headers_are_refused(tmp_path):
    long_name = archive(member("n" * 150), form=tarfile.GNU_FORMAT)[:1024]
    with pytest.raises(tarfile.TarError):
        unpacked(long_name * 5_000 + archive(member("a")), tmp_path / "root")


def test_many_members_take_no_memory(tmp_path):
    def content(number):
        return gzip.compress(archive(member("a"))[:512] * number + bytes(1024), 1)

    few, many = (peak_of(content(number), tmp_path / "root") for number in (100, 4_000))
    assert many < few + 2**20


def test_global_headers_take_no_memory(tmp_path):
    def content(number):
        headers = b"".join(
            tarfile.TarInfo.create_pax_global_header({f"k{index}": "x" * 400})
            + archive(member("a"))[:512]
            for index in range(number)
        )
        return headers + bytes(1024)

    few, many = (
        peak_of(content(number), tmp_path / "root") - len(content(number)) for number in (100, 600)
    )
    assert many < few + 2**20


def test_what_is_made_is_bounded_by_the_budget(tmp_path):
    bomb = gzip.compress(archive(member("zeros", content=bytes(50 * 2**20))), 9)
    with pytest.raises(tarfile.TarError, match="it unpacks to more than 1048576 bytes"):
        unpacked(bomb, tmp_path / "root", budget=2**20)
    assert sum(path.stat().st_size for path in (tmp_path / "root").rglob("*")) <= 2**20
    assert unpacked(bomb, tmp_path / "root") == []


def sparse(size):
    """A file of this size that is one hole, as GNU tar packs it."""
    header = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "hole",
        "GNU.sparse.realsize": str(size),
    }
    return archive(
        member("x", content=f"1\n{size}\n0\n".encode().ljust(512, b"\0"), pax_headers=header)
    )


def test_a_sparse_file_stays_sparse_and_its_size_counts(tmp_path):
    unpacked(sparse(40 * 2**20), tmp_path / "root")
    status = (tmp_path / "root/hole").stat()
    assert (status.st_size, status.st_blocks * 512 < 2**20) == (40 * 2**20, True)
    with pytest.raises(tarfile.TarError, match="it unpacks to more than"):
        unpacked(sparse(2**40), tmp_path / "other")
    with pytest.raises(tarfile.TarError, match="it unpacks to more than"):
        unpack_sent(sparse(40 * 2**20), tmp_path / "sent")


def test_what_a_sandbox_sends_is_not_decompressed(tmp_path):
    packed = gzip.compress(archive(member("a", content=b"x")))
    with pytest.raises(tarfile.TarError, match="not a tar archive"):
        unpack_sent(packed, tmp_path / "sent")
