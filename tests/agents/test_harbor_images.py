"""``HarborEnv(images=…)``: root file systems in every form that tools write them in, unpacked once
and safely."""

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

import verifiers as vf
from support.harbor_tasks import IMAGE, TEST, write_task
from support.isolated import needs_sandbox
from support.overlays import without_overlay
from support.root_files import write_root
from verifiers.testing import ScriptedClient
from verifiers_agents.harbor.images import MAX_JSON_BYTES, Image, ImageStore

SOURCES = ("folder", "export", "export.gz", "save", "layout", "layout.tar")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_root(tmp_path_factory.mktemp("image") / "files")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def archive(*members, folder=None):
    """A tar archive: of a folder, then (name, text or None for a folder)."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as file:
        if folder is not None:
            file.add(folder, ".")
        for name, content in members:
            member = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            if content is None:
                member.type = tarfile.DIRTYPE if member.isfile() else member.type
                member.mode = 0o755
                file.addfile(member)
            else:
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def link(name, target, kind=tarfile.SYMTYPE):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, None


CONFIG = {"config": {"Env": ["PATH=/opt/tools:/usr/bin", "FROM_IMAGE=yes"], "WorkingDir": "/srv"}}
SECOND_LAYER = archive(
    ("etc/.wh.mark", b""), ("etc/old/.wh..wh..opq", b""), ("etc/old/new", b"new\n"), ("srv", None)
)


def save(folder):
    """As ``docker save`` writes it."""
    manifest = [
        {"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["1/layer.tar", "2/layer.tar"]}
    ]
    return archive(
        ("1/layer.tar", archive(folder=folder)),
        ("2/layer.tar", SECOND_LAYER),
        ("config.json", json.dumps(CONFIG).encode()),
        ("manifest.json", json.dumps(manifest).encode()),
    )


def layout(folder):
    """The files of a layout of the Open Container Initiative, two images in it."""
    files = {}

    def blob(content):
        digest = hashlib.sha256(content).hexdigest()
        files[f"blobs/sha256/{digest}"] = content
        return {"digest": f"sha256:{digest}", "size": len(content)}

    layers = [blob(gzip.compress(archive(folder=folder), 1)), blob(SECOND_LAYER)]
    manifest = blob(
        json.dumps({"config": blob(json.dumps(CONFIG).encode()), "layers": layers}).encode()
    )
    second_manifest = blob(json.dumps({"config": blob(b"{}"), "layers": []}).encode())
    name = "org.opencontainers.image.ref.name"
    index = {
        "manifests": [
            second_manifest | {"annotations": {name: "other"}},
            manifest | {"annotations": {name: "bookworm"}},
        ]
    }
    return files | {
        "index.json": json.dumps(index).encode(),
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
    }


def source(kind, root, folder):
    """The path of an image in this form."""
    if kind == "folder":
        return root
    if kind == "layout":
        for name, content in layout(root).items():
            (folder / "layout" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "layout" / name).write_bytes(content)
        return folder / "layout"
    content = {
        "export": lambda: archive(folder=root),
        "export.gz": lambda: gzip.compress(archive(folder=root), 1),
        "save": lambda: save(root),
        "layout.tar": lambda: archive(*layout(root).items()),
    }[kind]()
    (folder / f"{kind}.tar").write_bytes(content)
    return folder / f"{kind}.tar"


def found(path):
    return ImageStore({IMAGE: str(path)}).find(IMAGE, "one")


@pytest.mark.parametrize("kind", SOURCES)
def test_every_form_is_unpacked_once_into_the_same_files(kind, root, tmp_path, cache):
    path = source(kind, root, tmp_path)
    image = found(path)
    has_layers = kind in ("save", "layout", "layout.tar")
    files = {str(file.relative_to(image.root)) for file in image.root.rglob("*")}
    expected = {str(file.relative_to(root)) for file in root.rglob("*")}
    if has_layers:
        expected = expected - {"etc/mark", "etc/old/file"} | {"etc/old/new", "srv"}
    assert files == expected
    assert (image.root / "usr/bin/bash").read_bytes() == (root / "usr/bin/bash").read_bytes()
    assert os.access(image.root / "usr/bin/bash", os.X_OK)
    assert os.readlink(image.root / "var/run") == "/run"
    assert (image.env.get("FROM_IMAGE"), image.workdir) == (
        ("yes", "/srv") if has_layers else (None, "/")
    )
    before = sorted((cache / "verifiers/images").glob("*")) if cache.exists() else []
    assert found(path) == image
    assert (sorted((cache / "verifiers/images").glob("*")) if cache.exists() else []) == before
    assert not [folder for folder in before if folder.name.startswith(".")]


def test_a_changed_source_is_unpacked_again(root, tmp_path):
    path = source("export", root, tmp_path)
    first = found(path)
    path.write_bytes(archive(("etc/added", b"x"), folder=root))
    second = found(path)
    assert first.root != second.root
    assert (second.root / "etc/added").read_text() == "x"


# --- hostile archives -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("../../out", b"x")], "'../../out' leads out of the image"),
        ([("usr/bin/../../../out", b"x")], "leads out of the image"),
        ([link("usr/out", "../../../../out", tarfile.LNKTYPE)], "which is no file before it"),
        ([link("usr/a", "b"), link("usr/b", "a"), ("usr/a/file", b"x")], "lead in a circle"),
        ([("usr", b"a file"), ("usr/file", b"x")], "lies in a file"),
    ],
)
def test_a_name_that_leads_out_is_refused_and_leaves_nothing(
    members, message, root, tmp_path, cache
):
    path = tmp_path / "hostile.tar"
    path.write_bytes(archive(("bin", None), *members))
    with pytest.raises(
        vf.ConfigError, match=f"task one: its image '{IMAGE}' cannot be read from .*{message}"
    ):
        found(path)
    assert not list((cache / "verifiers/images").glob("*")), (
        "nothing half unpacked stays, under any name"
    )
    assert not list(tmp_path.rglob("out"))


def test_a_file_behind_a_link_stays_below_the_root(tmp_path):
    """The negative control follows the link as this machine would."""
    outside = tmp_path / "outside"
    outside.mkdir()
    members = [
        ("bin", None),
        link("in", str(outside)),
        ("in/file", b"x"),
        link("up", "../../.."),
        ("up/two", b"y"),
    ]
    path = tmp_path / "linked.tar"
    path.write_bytes(archive(*members))
    image = found(path)
    assert (image.root / str(outside).lstrip("/") / "file").read_text() == "x"
    assert (image.root / "two").read_text() == "y"
    assert list(outside.iterdir()) == []
    assert os.path.realpath(image.root / "in") == str(outside), (
        "so an ordinary extraction would have written there"
    )


def test_damage_is_named(root, tmp_path):
    folder = source("layout", root, tmp_path)
    largest = max((folder / "blobs/sha256").iterdir(), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"?")
    with pytest.raises(
        vf.ConfigError, match=f"{largest.name} is damaged: its content has another digest"
    ):
        found(folder)
    for name, content, message in [
        ("cut.tar", archive(folder=root)[:100_000], "unexpected end of data"),
        ("text.tar", b"hello", "file could not be opened|not a"),
        ("empty.tar", archive(("notes", b"x")), "no folder bin or usr"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(vf.ConfigError, match=message):
            found(tmp_path / name)
    (tmp_path / "none").mkdir()
    with pytest.raises(vf.ConfigError, match="it is no root file system"):
        found(tmp_path / "none")


@pytest.mark.parametrize("kind", ["export", "export.gz", "save", "layout.tar"])
def test_an_archive_that_is_cut_anywhere_leaves_no_image(kind, tmp_path, cache):
    """The control is the whole archive."""
    folder = tmp_path / "small"
    (folder / "bin").mkdir(parents=True)
    for number in range(12):
        (folder / "bin" / str(number)).write_text(str(number) * 700)
    path = source(kind, folder, tmp_path)
    content = path.read_bytes()
    assert found(path).root is not None
    for cut in range(
        0,
        len(content) - 10_240 if kind != "export.gz" else len(content),
        max(1, len(content) // 60),
    ):
        (tmp_path / "cut.tar").write_bytes(content[:cut])
        with pytest.raises(vf.ConfigError, match="cannot be read from"):
            found(tmp_path / "cut.tar")
    assert len(list((cache / "verifiers/images").iterdir())) == 1


def test_a_layer_has_the_digest_that_its_configuration_names(root, tmp_path):
    """Layers that ``docker save`` writes have no digest in their names."""
    layer = archive(("bin", None), ("bin/tool", b"right"))

    def image(layers, digests):
        manifest = [
            {
                "Config": "config.json",
                "RepoTags": [IMAGE],
                "Layers": [f"{n}.tar" for n in range(len(layers))],
            }
        ]
        config = {
            "rootfs": {
                "diff_ids": [f"sha256:{hashlib.sha256(content).hexdigest()}" for content in digests]
            }
        }
        path = tmp_path / "image.tar"
        members = [(f"{number}.tar", content) for number, content in enumerate(layers)]
        texts = {"manifest.json": json.dumps(manifest), "config.json": json.dumps(config)}
        path.write_bytes(
            archive(*members, *((name, text.encode()) for name, text in texts.items()))
        )
        return path

    assert found(image([gzip.compress(layer)], [layer])).root is not None, (
        "the digest is that of the content"
    )
    with pytest.raises(vf.ConfigError, match=r"0\.tar is damaged: its content has another digest"):
        found(image([layer.replace(b"right", b"wrong")], [layer]))
    with pytest.raises(vf.ConfigError, match=r"it has 1 layers, and its config\.json names 2"):
        found(image([layer], [layer, layer]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * 100_000, "it is damaged"),
        (b'{"manifests": [1]}', "it has no file|it is damaged"),
        (b"[[]]", "it is damaged"),
        (b"null", "it is damaged"),
        (b'[{"Config": 1, "Layers": [2]}]', "it is damaged"),
        (b"[" + b" " * MAX_JSON_BYTES, r"manifest\.json is longer than 4 MiB"),
    ],
)
def test_a_manifest_of_any_shape_is_one_sentence(text, message, tmp_path):
    path = tmp_path / "image.tar"
    path.write_bytes(archive(("manifest.json", text)))
    with pytest.raises(
        vf.ConfigError, match=f"its image '{IMAGE}' cannot be read from .*({message})"
    ):
        found(path)


def test_the_modes_of_an_image_stay_inside_it(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o600)
    folder = tarfile.TarInfo("d")
    folder.type, folder.mode = tarfile.DIRTYPE, 0o777
    path = tmp_path / "image.tar"
    path.write_bytes(archive(("bin", None), (folder, None), link("d", str(secret))))
    assert (found(path).root / "d").is_symlink()
    assert secret.stat().st_mode & 0o777 == 0o600


def test_a_small_source_does_not_fill_the_disk(tmp_path, cache):
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(archive(("bin", None), ("bin/zeros", bytes(64 * 2**20))), 9))
    assert path.stat().st_size < 2**17
    with pytest.raises(vf.ConfigError, match="it unpacks to more than"):
        found(path)
    assert not list((cache / "verifiers/images").iterdir())


# --- names ----------------------------------------------------------------------------------------


def test_an_image_that_is_not_there_is_one_sentence_that_says_how_to_get_it(tmp_path):
    task = write_task(tmp_path / "one")
    command = (
        "docker save debian:bookworm -o debian_bookworm.tar` .without Docker: `skopeo copy"
        " docker://debian"
    )
    with pytest.raises(
        vf.ConfigError, match=rf"its image 'debian:bookworm' is not here.*{command}"
    ):
        vf.HarborEnv(task)
    with pytest.raises(vf.ConfigError, match=r"with the file debian_bookworm\.tar in it"):
        vf.HarborEnv(task, images=tmp_path)
    with pytest.raises(
        vf.ConfigError, match=r"of its image 'debian:bookworm', .*/gone is not there"
    ):
        vf.HarborEnv(task, images={IMAGE: tmp_path / "gone"})


def test_a_folder_of_images_has_them_by_name(root, tmp_path):
    (tmp_path / "images").mkdir()
    source("export", root, tmp_path).rename(tmp_path / "images" / "debian_bookworm.tar")
    assert ImageStore(tmp_path / "images").find(IMAGE, "one").root is not None
    assert ImageStore({"python:3": "host"}).find("python:3", "one") == Image()
    with pytest.raises(vf.ConfigError, match=r"with the file _\.\._etc_passwd\.tar in it"):
        ImageStore(tmp_path / "images").find("../../etc/passwd", "one")


# --- tasks in an image ----------------------------------------------------------------------------


def play(task, commands, images, **parameters):
    calls = [
        vf.ToolCall(f"c{n}", "bash", {"command": command}) for n, command in enumerate(commands)
    ]
    env = vf.HarborEnv(task, images=images, sandbox=needs_sandbox(), **parameters)
    return env.evaluate(ScriptedClient([*calls, "done"]), "m")


DOCKERFILE = f"""FROM {IMAGE}
ENV WHO=me PATH=/opt/own:$PATH
COPY start.txt /data/
RUN rm -r /etc/old && mkdir /etc/old && echo $WHO > /etc/old/who && rm /usr/bin/sleep && echo built > /usr/built
WORKDIR /app
RUN mkfifo pipe && ln -s /usr/built link && pwd > where
"""


@pytest.fixture(params=["overlay", "copy"])
def is_copied(request, cache, tmp_path):
    """Whether the cache of images is where the kernel mounts no overlay, so that each sandbox has a
    copy."""
    folders = [cache] if request.param == "overlay" else without_overlay(tmp_path / "mounted")
    for folder in folders:
        if folder != cache:
            cache.symlink_to(folder)
        yield folder != cache


def test_a_task_is_built_played_and_graded_in_its_image(root, tmp_path, is_copied):
    path = source("save", root, tmp_path)
    test = TEST.replace("if [", "[ -e /usr/built ] && [ ! -e /usr/bin/sleep ] || exit 1\nif [")
    task = write_task(tmp_path / "one", 'artifacts = ["/app"]', dockerfile=DOCKERFILE, test=test)
    commands = [
        (
            "pwd; ls /etc/old; cat /etc/old/who /data/start.txt link where; command -v sleep perl;"
            " echo $PATH,$FROM_IMAGE"
        ),
        (
            "ls -d /srv /etc/mark /opt/sandbox/image; [ -p pipe ] && echo a pipe; rm -r /data; echo"
            " right > out.txt"
        ),
    ]
    results = play(task, commands, {IMAGE: path})
    assert results["errors"] == [None]
    first, second = [
        message["content"] for message in results["completions"][0] if message["role"] == "tool"
    ]
    assert first.split() == [
        "/app",
        "who",
        "me",
        "start",
        "built",
        "/app",
        "/opt/own:/opt/tools:/usr/bin,yes",
    ]
    assert "No such file" in second
    assert ("/srv\n" in second, "a pipe" in second, "/opt/sandbox/image\n" in second) == (
        True,
        True,
        is_copied,
    )
    assert results["rewards"] == [1.0]
    assert play(task, ["echo wrong > out.txt"], {IMAGE: path})["rewards"] == [0.0]


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_oracle_and_nop_work_in_a_folder_as_it_is(agent, reward, root, tmp_path):
    task = write_task(tmp_path / "one", dockerfile=f"FROM {IMAGE}\nWORKDIR /app\n")
    before = {str(path): path.lstat().st_mtime_ns for path in root.rglob("*")}
    results = play(task, [], {IMAGE: root}, agent=agent)
    assert (results["errors"], results["rewards"]) == ([None], [reward])
    assert {str(path): path.lstat().st_mtime_ns for path in root.rglob("*")} == before


def test_an_image_without_a_program_that_tasks_need_is_named(tmp_path):
    small = write_root(tmp_path / "small", without=("tar", "find"))
    task = write_task(tmp_path / "one")
    with pytest.raises(
        vf.ConfigError, match=f"task one: its image '{IMAGE}' has no tar, find, which"
    ):
        play(task, ["true"], {IMAGE: small})


AGENT = r"""
url=${OPENAI_BASE_URL#http://}; path=/${url#*/}
body='{"model": "m", "messages": [{"role": "user", "content": "'$1'"}]}'
exec 3<> /dev/tcp/127.0.0.1/8000
printf 'POST %s/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %s\r\n\r\n%s' \
    "$path" "${#body}" "$body" >&3
case $(cat <&3) in *write-it*) cat /etc/mark > mark.txt; echo right > out.txt;; esac
"""


def test_an_agent_program_works_in_an_image_without_an_interpreter(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("agent.sh").write_text(AGENT)
    task = write_task(tmp_path / "one", dockerfile=f"FROM {IMAGE}\nWORKDIR /app\n")
    env = vf.HarborEnv(
        task,
        command=["bash", "agent.sh", "{prompt}"],
        images={IMAGE: root},
        sandbox=needs_sandbox(),
    )
    (output,) = env.evaluate(ScriptedClient("write-it"), "m").outputs
    assert output.error is None
    assert (output.reward, output.stop_condition, output["agent"]["roles"]) == (
        1.0,
        "agent_ended",
        ["main"],
    )
