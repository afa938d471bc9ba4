"""Stores behind a URL: in memory, in an S3 bucket of a server of our own, and on a machine that fails."""

import hashlib
import multiprocessing
import os
import uuid
from concurrent.futures import ProcessPoolExecutor

import pytest

from mmfact.cli.main import main
from mmfact.factorize.errors import ArtifactCorrupt, ArtifactNotFound, RefError, StoreError
from mmfact.store.gc import collect
from mmfact.store.remote import Remote, cache_directory, is_remote
from mmfact.store.store import ArtifactStore, load

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMFACT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def s3():
    """The address of a local server that speaks S3, with one bucket."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    endpoint = f"http://127.0.0.1:{port}"
    options = {"key": "test", "secret": "test", "client_kwargs": {"endpoint_url": endpoint, "region_name": "eu-west-1"}}
    fsspec.filesystem("s3", **options).mkdir("bucket")
    yield options
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def remote(request):
    """A store of its own, and a second one at the same place, as another machine would have it."""
    if request.param == "memory":
        url, options = f"memory://{uuid.uuid4().hex}", None
    else:
        url, options = f"s3://bucket/{uuid.uuid4().hex}", request.getfixturevalue("s3")
    return ArtifactStore(url, storage_options=options), ArtifactStore(url, storage_options=options)


def overwrite(store, name, data):
    """As only an administrator can."""
    store.folder._files.pipe_file(store.folder._path(name), data)


def test_saved_here_and_loaded_there(remote, factorization, other_factorization, same, cache):
    here, there = remote
    saved = here.save(factorization, "one")
    here.save(other_factorization, "two")
    assert there.refs() == ["one", "two"]
    assert same(there.load("one"), saved)
    assert same(there.load(saved.digest[:12]), saved)
    assert [(entry.ref, entry.error) for entry in there.entries()] == [("one", None), ("two", None)]
    assert len(here.files()) == 2
    assert there.save(factorization, "one").digest == saved.digest
    assert len(here.files()) == 2
    assert saved.path.parent == cache
    with pytest.raises(ArtifactNotFound, match="did you mean one"):
        there.load("on")


def test_refs_never_move(remote, factorization, other_factorization):
    """Put if absent: the second of two machines gets an error, not the ref."""
    here, there = remote
    here.save(factorization, "ref")
    with pytest.raises(RefError, match="already names another"):
        there.save(other_factorization, "ref")
    assert not here.folder.publish("refs/ref.json", b"{}")
    assert here.load("ref").workload.kind == factorization.workload.kind


def test_download_is_checked(remote, factorization):
    """Bytes that changed on the way or in the bucket are refused, and moved to its quarantine."""
    here, there = remote
    name = here.save(factorization, "ref").path.name
    path = cache_directory() / name
    data = path.read_bytes()
    path.unlink()
    overwrite(here, name, data[:-1])
    with pytest.raises(ArtifactCorrupt, match="is damaged"):
        there.load("ref")
    (moved,) = here.folder.names("quarantine")
    assert moved.startswith(name)
    assert there.lost("ref")
    here.save(factorization, "ref")
    assert there.load("ref").n == 3


def test_copies_are_not_believed(remote, factorization):
    here, there = remote
    saved = here.save(factorization, "ref")
    copy = cache_directory() / saved.path.name
    for wrong in (b"", b"x" * 100, copy.read_bytes()[:-1] + b"\0"):
        copy.chmod(0o644)
        copy.write_bytes(wrong)
        assert there.load("ref").digest == saved.digest
        assert hashlib.sha256(copy.read_bytes()).hexdigest() == saved.path.stem[65:]
    assert here.folder.names("quarantine") == []


def test_a_copy_saves_the_download(remote, factorization, monkeypatch):
    here, there = remote
    here.save(factorization, "ref")
    there.load("ref")
    files = there.folder._files
    read, got = files.cat_file, []
    monkeypatch.setattr(files, "cat_file", lambda path, **options: got.append(path) or read(path, **options))
    there.load("ref")
    assert [path.rpartition("/")[2] for path in got] == ["ref.json"]


def test_removed_and_collected(remote, factorization, other_factorization):
    here, there = remote
    here.save(factorization, "one")
    here.save(other_factorization, "two")
    there.remove("one")
    assert here.refs() == ["two"]
    assert collect(here).unnamed == ()
    assert len(collect(here, older_than=0).unnamed) == 1
    assert len(there.files()) == 1
    assert there.load("two").n == 3
    overwrite(here, "PROTECTED", b"")
    with pytest.raises(StoreError, match="protected"):
        there.remove("two")


def test_command_line(remote, factorization, monkeypatch, capsys):
    """`--store URL`, with what the environment says about credentials."""
    here, _ = remote
    here.save(factorization, "ref")
    options = here.folder._options
    if options:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
        monkeypatch.setenv("AWS_ENDPOINT_URL", options["client_kwargs"]["endpoint_url"])
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    for command in (["list"], ["inspect", "ref"], ["verify", "ref"]):
        with pytest.raises(SystemExit) as end:
            main([*command, "--store", here.folder._url])
        assert end.value.code == 0
        assert "ref" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_other_processes_share_it(s3, factorization, same, way):
    """A connection does not survive a fork; each process makes its own."""
    store = ArtifactStore(f"s3://bucket/{uuid.uuid4().hex}", storage_options=s3)
    saved = store.save(factorization, "ref")
    with ProcessPoolExecutor(2, multiprocessing.get_context(way)) as pool:
        loads = [pool.submit(store.load, "ref") for _ in range(4)]
        assert all(same(load.result(timeout=60), saved) for load in loads)


def test_failing_machines(s3, factorization, tmp_path, monkeypatch):
    nobody = {**s3, "client_kwargs": {"endpoint_url": "http://127.0.0.1:9", "region_name": "eu-west-1"}}
    nobody["config_kwargs"] = {"retries": {"max_attempts": 1}, "connect_timeout": 1}
    store = ArtifactStore("s3://bucket/x", storage_options=nobody)
    for call in (lambda: store.load("ref"), store.refs, lambda: store.save(factorization, "ref")):
        with pytest.raises(StoreError, match="check the address"):
            call()
    with pytest.raises(StoreError, match="nobucket"):
        ArtifactStore("s3://nobucket/x", storage_options=s3).save(factorization, "ref")
    with pytest.raises(StoreError, match="nosuch"):
        ArtifactStore("nosuch://x")
    with pytest.raises(StoreError, match="leave them out"):
        ArtifactStore(tmp_path, storage_options={"a": 1})


def test_without_fsspec(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(StoreError, match=r"pip install 'mmfact\[remote\]'"):
        ArtifactStore("memory://x")


def test_secrets_of_a_url_are_not_said(monkeypatch):
    """A password or a signature in the URL goes to fsspec only."""

    def fail(url, **options):
        raise ValueError(f"cannot open {url}")

    monkeypatch.setattr(fsspec, "url_to_fs", fail)
    with pytest.raises(StoreError) as caught:
        Remote("ftp://user:hunter2@host/store?sig=hunter3")
    assert "hunter" not in str(caught.value)
    assert "ftp://host/store" in str(caught.value)


@pytest.mark.parametrize("url", ["s3://KEY:hunter2@bucket/x", "memory://x?sig=hunter2", "s3://[hunter2"])
def test_urls_with_secrets_or_none_at_all(url):
    with pytest.raises(StoreError) as caught:
        ArtifactStore(url)
    assert "hunter2" not in str(caught.value) or url == "s3://[hunter2"


def test_a_damaged_original_is_mended_though_a_copy_is_whole(remote, factorization):
    """A save must not be content with the copy on this machine."""
    here, there = remote
    name = here.save(factorization, "ref").path.name
    overwrite(here, name, b"damaged")
    here.save(factorization, "ref")
    (cache_directory() / name).unlink()
    assert there.load("ref").n == 3


@pytest.mark.parametrize("path", ["artifacts", "/tmp/a", "c:/store", "C:\\store", "a:b", "C://store"])
def test_what_is_no_url(path):
    assert not is_remote(path)


def test_file_urls_are_directories(tmp_path, factorization):
    """With all that a directory can promise."""
    store = ArtifactStore(f"file://{tmp_path}/store")
    store.save(factorization, "ref")
    assert store.path == tmp_path / "store"
    assert load("ref", store=tmp_path / "store").n == 3
    assert os.stat(store.load("ref").path).st_mode & 0o777 == 0o444
