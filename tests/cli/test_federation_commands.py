"""``keys``, ``serve`` and ``join``: what is refused before anything is started."""

import stat
import urllib.request

import pytest

pytest.importorskip("flwr")

from page_runs import written
from small_runs import command

from bespoke import UserError
from bespoke.flower.demo import EXPERIMENT as EXAMPLE
from bespoke.report.page.live import listen


def test_keys_are_made_once_for_their_owner_alone(tmp_path):
    path = tmp_path / "new" / "node.key"
    made = command("keys", path)
    assert made.code == 0 and made.out == (tmp_path / "new" / "node.key.pub").read_text()
    assert made.out.startswith("ecdsa-sha2-nistp384 ") and stat.S_IMODE(path.stat().st_mode) == 0o600
    again = command("keys", path)
    assert (
        again.code == 2
        and "never overwritten" in again.err
        and (path.with_name("node.key.pub")).read_text() == made.out
    )
    path.unlink()
    stray = command("keys", path)  # the public key of some other private one
    assert stray.code == 2 and "node.key.pub is already there: keys are never overwritten" in stray.err
    assert not path.exists() and path.with_name("node.key.pub").read_text() == made.out


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org", "::"])
def test_insecure_is_for_this_machine_alone(tmp_path, host):
    for words in (("serve", EXAMPLE), ("join", f"{host}:9092", "--experiment", "x")):
        more = ("--address", f"{host}:9092") if words[0] == "serve" else ("--data", "x", "--home", tmp_path)
        found = command(*words, *more, "--insecure")
        assert found.code == 2 and "--insecure is for one machine alone" in found.err


def test_what_serve_needs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = command("serve", EXAMPLE)
    assert found.code == 2 and "have them made by --make-certificates HOST" in found.err
    found = command("serve", EXAMPLE, "--make-certificates", "server.example")
    assert found.code == 2 and "no client's key is known" in found.err
    made = [tmp_path / "federations", *(tmp_path / "federations").rglob("*")]
    assert len(made) == 6 and all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in made)
    found = command("serve", EXAMPLE, "--make-certificates", "server.example")
    assert found.code == 2 and "certificates are never overwritten" in found.err
    (tmp_path / "keys").write_text("ssh-rsa AAAA nobody\n")
    found = command(
        "serve", EXAMPLE, "--make-certificates", "server.example", "--register", tmp_path / "keys", "--resume"
    )
    assert found.code == 2 and "is no public key" in found.err  # the same command may go on with a run
    found = command("serve", EXAMPLE, "--register", tmp_path / "keys")
    assert found.code == 2 and "is no public key: give the line that bespoke keys prints" in found.err
    found = command("serve", EXAMPLE, "--address", "nowhere")
    assert found.code == 2 and "write HOST:PORT" in found.err


def test_serve_shows_its_run_live(tmp_path, monkeypatch):
    """The page is there while the server runs, and follows OUT/run."""
    from bespoke.flower import server

    seen = []

    def serve(experiment, folder, *args, **settings):
        made = written(folder / "run")
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/update", timeout=20).read().decode()
        seen.append("run has ended after 4 of 4 rounds" in page)
        raise UserError(f"{made.path} is enough")

    with listen(0) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr("bespoke.flower.children.end_as_asked", lambda: None)
    found = command("serve", EXAMPLE, "--insecure", "--out", tmp_path, "--live", port)
    assert "is enough" in found.sentence and found.err.startswith(f"live: http://127.0.0.1:{port}/\n")
    assert seen == [True]
    listen(port).close()


def test_what_join_needs(tmp_path):
    words = "join", "127.0.0.1:1", "--experiment", "x", "--data", tmp_path, "--home", tmp_path / "home"
    assert "give --key and --ca" in command(*words).err
    (tmp_path / "key").write_text("no key")
    found = command(*words, "--key", tmp_path / "key", "--ca", tmp_path / "ca")
    assert found.code == 2 and "holds no private key" in found.err
    command("keys", tmp_path / "node.key")
    found = command(*words, "--key", tmp_path / "node.key", "--ca", tmp_path / "ca")
    assert found.code == 2 and "is no file: get the server's ca.crt" in found.err
