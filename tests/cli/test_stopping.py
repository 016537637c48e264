"""How a signal ends a run."""

import signal

import pytest

from bespoke.cli.stopping import stopping


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_its_round_and_a_second_one_at_once(number, code, capsys):
    before = signal.getsignal(number)
    with stopping() as stopped:
        assert not stopped() and stopped.code == 130
        signal.raise_signal(number)
        assert stopped() and stopped.code == code
        assert "finishing this round, then saving a checkpoint" in capsys.readouterr().err
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(number)
        assert ended.value.code == code
    assert signal.getsignal(number) is before
