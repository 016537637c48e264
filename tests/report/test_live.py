"""The page while runs go on: who is answered, what it shows, and what a run notices of it."""

import html
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest
from page_runs import HOSTILE, begun, step, written
from small_runs import assert_same_result, command, write

from bespoke.cli import live as options
from bespoke.report import probes
from bespoke.report.page import live, page_of
from bespoke.report.page.parts import Live, Page
from bespoke.runs import api


@contextmanager
def served(followed):
    """A server in a thread of this process."""
    with live.Server(live.listen(0), followed) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(url, path="/", method="GET", hosts=None, **headers):
    """Status, headers and text of an answer; `hosts` are the headers Host, by default the right one."""
    place = url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(place, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    for host in [place] if hosts is None else hosts:
        connection.putheader("Host", host)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


@pytest.fixture(autouse=True)
def prompt(monkeypatch):
    """Pages are made as soon as a record has changed, however soon."""
    monkeypatch.setattr(live, "REST", 0.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return written(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture(scope="module")
def server(made):
    with served(live.Followed([made.path.parent])) as running:
        yield running


# --- who is answered ----------------------------------------------------------------------------------------------


def test_only_its_own_name_is_answered(server):
    """A site whose name leads to this machine sends its own name."""
    place = server.url[7:-1]
    port = place.partition(":")[2]
    assert ask(server.url, hosts=[f"LOCALHOST:{port}"])[0] == 200
    others = ["evil.example", f"evil.example:{port}", "127.0.0.1", "localhost:1", f"127.0.0.1.evil.example:{port}", ""]
    for hosts in [*([other] for other in others), [], [place, "evil.example"], [place, place]]:
        for method in ("GET", "HEAD", "POST"):
            status, _, text = ask(server.url, method=method, hosts=hosts)
            assert status == 403 and "fedavg" not in text, hosts


def test_nothing_but_the_page_is_read_and_nothing_is_written(server, made):
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        status, headers, _ = ask(server.url, method=method)
        assert status == 405 and headers["Allow"] == "GET, HEAD", method
    paths = ["/config.toml", "/run/config.toml", "/../config.toml", "/%2e%2e/config.toml", "/update/", "/.", "*"]
    for path in [*paths, f"//{made.path}/config.toml", f"file://{made.path}/config.toml", server.url]:
        assert ask(server.url, path)[0] == 404, path
    assert ask(server.url, method="BREW")[0] == 501


def test_the_answer_says_what_a_browser_may_do_with_it(server):
    status, headers, text = ask(server.url)
    assert status == 200 and len(text) > 4_000_000 and 'id="live"' in text
    assert headers["Cache-Control"] == "no-store" and headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and policy.endswith("connect-src 'self'")
    status, headers, text = ask(server.url, method="HEAD")
    assert status == 200 and text == "" and int(headers["Content-Length"]) > 4_000_000


def test_an_update_is_small_and_sent_once(server):
    status, headers, text = ask(server.url, "/update")
    assert status == 200 and len(text) < 200_000 and text.count("<script") == 3 and "<script></script>" in text
    again = ask(server.url, "/update", If_None_Match=headers["ETag"])
    assert (again[0], again[2], again[1]["ETag"]) == (304, "", headers["ETag"])
    assert ask(server.url, "/update", If_None_Match='"other"')[0] == 200


# --- what it shows ------------------------------------------------------------------------------------------------


def test_a_page_waits_follows_the_rounds_and_ends(made, tmp_path):
    followed = live.Followed([tmp_path / "later", tmp_path / "later"])
    assert followed.newest().live == Live("No run has begun yet.")
    run = begun(made, tmp_path / "later")
    assert followed.newest().page.title == "Waiting for an evaluated round"
    step(made, run, 1)
    first = followed.newest()
    assert first.page == page_of(run.path, ended=False) and first.live.text.startswith(
        "later has done 1 of 4 rounds. Last record at"
    )
    assert followed.newest() is first
    step(made, run, 2)
    second = followed.newest()
    assert second.page == page_of(run.path, ended=False) != first.page and second.tag != first.tag
    followed.over = True
    last = followed.newest()
    assert last.page == page_of(run.path) != second.page and last.live.over  # it lacks rounds
    assert last.live.text.startswith("later has ended after 2 of 4 rounds.") and "stays as it is" in last.live.text


def test_a_run_that_stopped_early_has_ended_and_goes_on_when_resumed(made, tmp_path):
    run = begun(made, tmp_path / "run")
    step(made, run, 1)
    run.write_json("summary.json", {})
    followed = live.Followed([run.path])
    assert "has ended after 1 of 4 rounds" in followed.newest().live.text and not followed.newest().live.over
    (run.path / "config.toml").write_bytes((made.path / "config.toml").read_bytes())  # as resuming does
    assert "has done 1 of 4 rounds" in followed.newest().live.text


def test_features_that_are_written_after_the_run_appear(made, tmp_path):
    run = begun(made, tmp_path / "run")
    step(made, run, 1)
    followed = live.Followed([run.path])
    assert "probe" not in [section.name for section in followed.newest().page.sections]
    vectors, none = np.eye(4, dtype=np.float32), np.zeros(0, dtype=np.int64)
    who = np.arange(4)
    probes.write(run.path, probes.Probe("train", 1, vectors, who, who, np.zeros((0, 2), dtype=np.float32), none))
    assert "probe" in [section.name for section in followed.newest().page.sections]


def test_a_run_that_ended_without_an_evaluation(made, tmp_path):
    begun(made, tmp_path / "run")
    followed = live.Followed([tmp_path])
    followed.over = True
    assert followed.newest().page.title == "No round was evaluated"


def test_runs_appear_in_a_folder(made, tmp_path):
    followed = live.Followed([tmp_path])
    for name in ("<b>a", "b", "c", "d", "e"):
        run = begun(made, tmp_path / name)
    step(made, run, 1)
    shown = followed.newest()
    assert shown.page.title == "Report of fedavg"
    assert shown.live.text.startswith("0 of 5 runs have ended. Going on: <b>a (0 of 4 rounds), b (0 of 4 rounds), c")
    assert "and 2 more." in shown.live.text and b"&lt;b&gt;a (0" in shown.update
    for number in (2, 3, 4):
        step(made, run, number)
    assert followed.newest().live.text.startswith("1 of 5 runs have ended.")


def test_what_is_wrong_with_a_record_is_told_and_the_page_stays(made, tmp_path):
    run = begun(made, tmp_path / "run")
    step(made, run, 1)
    followed = live.Followed([run.path])
    page = followed.newest().page
    sound = (run.path / "environment.json").read_bytes()
    (run.path / "environment.json").write_text("[]")
    shown = followed.newest()
    assert shown.page == page and "cannot be brought up to date" in shown.live.text
    assert "environment.json is damaged" in shown.live.text
    (run.path / "environment.json").write_bytes(sound)
    os.rename(run.path / "rounds.jsonl", tmp_path / "kept")
    os.mkfifo(run.path / "rounds.jsonl")
    assert "rounds.jsonl: it is no regular file; restore it" in followed.newest().live.text
    os.rename(tmp_path / "kept", run.path / "rounds.jsonl")
    assert followed.newest().live.text.startswith("run has done")


def test_an_error_of_the_page_itself_is_shown_in_it(made):
    def broken(paths, ended):
        raise ZeroDivisionError(HOSTILE[0])

    with served(live.Followed([made.path], broken)) as server:
        status, _, text = ask(server.url, "/update")
        assert status == 200 and "ZeroDivisionError: &lt;script&gt;" in text
        server.followed.newest = lambda: 1 / 0
        status, headers, text = ask(server.url)
        assert status == 500 and "ZeroDivisionError" in text and headers["Content-Type"].startswith("text/plain")


def test_many_who_ask_cost_one_page(made):
    calls, both = [], threading.Barrier(6)

    def make(paths, ended):
        calls.append(paths)
        return Page("once", "", (), (), ())

    def one(_):
        both.wait()
        return ask(server.url, "/update")

    with served(live.Followed([made.path], make)) as server, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(one, range(6)))
    assert {status for status, _, _ in answers} == {200} and len({text for _, _, text in answers}) == 1
    assert calls == [[made.path]]


def test_a_page_that_takes_long_is_made_seldom(made, tmp_path, monkeypatch):
    run = begun(made, tmp_path / "run")
    step(made, run, 1)
    monkeypatch.setattr(live, "REST", 1e9)
    followed = live.Followed([run.path])
    first = followed.newest()
    step(made, run, 2)
    assert followed.newest() is first
    followed.over = True  # but the last one is made whatever it costs
    assert followed.newest().page == page_of(run.path)


# --- the commands -------------------------------------------------------------------------------------------------


def test_the_port_may_be_left_out():
    assert options.with_ports([]) == []
    assert options.with_ports(["run", "--live", "x"]) == ["run", "--live=usual", "x"]
    assert options.with_ports(["run", "x", "--live"]) == ["run", "x", "--live=usual"]
    assert options.with_ports(["run", "--live", "80", "--watch=9"]) == ["run", "--live", "80", "--watch=9"]
    assert f"port {live.PORT}," in options.Live.__metadata__[0].help
    with live.listen() as usual, live.listen() as other:
        assert len({usual.getsockname(), other.getsockname()}) == 2
        assert {name for name, _ in (usual.getsockname(), other.getsockname())} == {"127.0.0.1"}


def test_mistakes(made, tmp_path):
    path = write(tmp_path / "small.toml")
    with live.listen(0) as taken:
        port = taken.getsockname()[1]
        for words in (("run", path, "--out", tmp_path / "run", "--live"), ("report", made.path, "--watch")):
            said = command(*words, port).sentence
            assert (
                said
                == f"port {port} cannot be used: address already in use; choose another one, or 0 for any that is free"
            )
    assert not (tmp_path / "run").exists()
    assert "70000 is no port" in command("run", path, "--live", 70000).sentence
    assert "takes the number of a port" in command("run", path, "--live=http").sentence
    assert "there is no folder" in command("report", tmp_path / "no", "--watch").sentence
    for words in (("sweep", "pfedfda/t2", "--live"), ("tune", path, "--live", 80), ("run", path, "--watch")):
        assert "run and serve have --live, and report has --watch" in command(*words).sentence
    assert "writes no file" in command("report", made.path, "--watch", "-o", "page.html").sentence


def test_a_run_is_the_same_with_a_page_beside_it_which_ends_with_it(tmp_path, monkeypatch):
    path = write(tmp_path / "small.toml", training={"rounds": 2})
    with live.listen(0) as free:
        port = free.getsockname()[1]
    url, carry_out, found = f"http://127.0.0.1:{port}/", api.run, []

    def looked_at(*arguments, **options):
        found.append(ask(url)[2])
        done, end = carry_out(*arguments, **options), time.monotonic() + 20
        while "has ended after 2 of 2 rounds" not in found[-1] and time.monotonic() < end:  # it rests after a page
            found.append(ask(url)[2])
        return done

    with monkeypatch.context() as patched:
        patched.setattr(api, "run", looked_at)
        done = command("run", path, "--out", tmp_path / "live", "--live", port)
    assert done.code == 0 and done.err.splitlines()[0] == f"live: {url}", done.err
    assert "<title>Waiting for an evaluated round</title>" in found[0]
    assert "<title>Report of fedavg</title>" in found[-1] and "live has ended after 2 of 2 rounds" in found[-1]
    live.listen(port).close()  # nobody is there any more
    assert command("run", path, "--out", tmp_path / "plain").code == 0
    assert_same_result(tmp_path / "live", tmp_path / "plain")


def test_a_page_that_asked_a_moment_ago_is_sent_the_end(made, tmp_path, monkeypatch):
    run, taken = begun(made, tmp_path / "run"), threading.Event()
    step(made, run, 1)
    monkeypatch.setattr(live, "SILENT", 30.0)
    monkeypatch.setattr(live.time, "sleep", taken.wait)  # until the page has the last state
    with served(live.Followed([run.path])) as server, ThreadPoolExecutor(1) as pool:
        assert 'class="over"' not in ask(server.url, "/update")[2]
        ending = pool.submit(server.end)
        while 'class="over"' not in (text := ask(server.url, "/update")[2]):
            assert not ending.done()
        assert "has ended after 1 of 4 rounds" in text and not ending.done()
        taken.set()
        ending.result()


def test_watch_ends_at_once_with_ctrl_c(made):
    words = [sys.executable, "-m", "bespoke", "report", str(made.path), "--watch", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    url = re.fullmatch(r"watching: (http://127\.0\.0\.1:\d+/) until Ctrl-C\n", line)[1]
    assert "run has ended after 4 of 4 rounds" in ask(url, "/update")[2]
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "") and process.returncode == 0
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(url[17:-1])), timeout=1).close()


def started(path):
    """A server in a thread, which the test ends, and a request for its page."""
    server = live.Server(live.listen(0), live.Followed([path]))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server, f"GET / HTTP/1.1\r\nHost: {server.url[7:-1]}\r\n\r\n".encode()


@contextmanager
def connected(server, count, sent=b""):
    """Connections that have sent something and read nothing."""
    place = server.socket.getsockname()
    with ExitStack() as held:
        made = [held.enter_context(socket.create_connection(place)) for _ in range(count)]
        for connection in made:
            connection.sendall(sent)
        yield made


def test_nobody_who_sends_or_reads_slowly_delays_the_end(made, monkeypatch):
    """Requests that come byte by byte, connections without any, and answers that nobody takes."""
    monkeypatch.setattr(live._Handler, "timeout", None)  # a server that waited for them would never end
    stop = threading.Event()

    def dribble(connections):
        while not stop.wait(0.02):
            for connection in connections:
                with suppress(OSError):
                    connection.sendall(b"x")

    def ended():
        server.shutdown()
        server.server_close()

    server, asking = started(made.path)
    with (
        ThreadPoolExecutor(2) as pool,
        connected(server, 5, b"GET / HTTP/1.1\r\nX: ") as slow,
        connected(server, 5),
        connected(server, 2, asking) as deaf,
    ):
        pool.submit(dribble, slow)
        assert ask(server.url)[0] == 200  # those who do as they should are answered meanwhile
        for connection in deaf:
            assert connection.recv(1)  # its answer is under way
        try:
            pool.submit(ended).result(timeout=20)
        finally:
            stop.set()
    with pytest.raises(OSError):
        ask(server.url)


def test_an_answer_that_is_under_way_arrives(made):
    """Of a page whose server ends while it is read."""
    server, asking = started(made.path)
    with connected(server, 1, asking) as (reader,), ThreadPoolExecutor(1) as pool:
        text = reader.recv(1)
        server.shutdown()
        ending = pool.submit(server.server_close)
        while part := reader.recv(2**20):
            text += part
        ending.result()
    head, _, body = text.partition(b"\r\n\r\n")
    assert len(body) == int(re.search(rb"Content-Length: (\d+)", head)[1]) and body.endswith(b"</html>")
