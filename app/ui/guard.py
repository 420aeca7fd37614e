"""No page shows a traceback: every page and every live fragment runs inside `guarded`.

Expected troubles (store, runbook, flags, an engine that does not answer) already carry a sentence for the
user. Anything else is a defect of ours: the page says so in one sentence and the log gets the traceback.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

import streamlit as st

from app.runtime import AppError
from app.ui.debug import EngineUnreachableError
from app.ui.words import plain
from engine.config import ConfigError
from probe.alerts.backtest import BacktestError
from probe.replay.scenario import ReplayError
from probe.store import StoreError
from probe.targets import TargetError
from runbooks.command_edit import CommandError
from runbooks.launch_line import LaunchLineError
from runbooks.load import RunbookError

P = ParamSpec("P")
log = logging.getLogger("kvoncall.app")

_EXPECTED = (
    AppError,
    BacktestError,
    CommandError,
    ConfigError,
    EngineUnreachableError,
    LaunchLineError,
    ReplayError,
    RunbookError,
    StoreError,
    TargetError,
)


def sentence(error: Exception) -> str:
    """What the user reads about `error`."""
    if isinstance(error, _EXPECTED):
        return str(error)
    what = f"{type(error).__name__}: {_first_line(error)}"
    return f"This part of the page failed ({what}); the app's log has the details."


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"


@contextmanager
def guarded() -> Iterator[None]:
    """Shows one sentence in place of what is inside when that fails."""
    try:
        yield
    except _EXPECTED as error:
        st.error(plain(sentence(error)))
    except Exception as error:
        log.exception("a page failed")
        st.error(plain(sentence(error)))


def page(body: Callable[P, None]) -> Callable[P, None]:
    """Decorator of a page's function."""

    @functools.wraps(body)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with guarded():
            body(*args, **kwargs)

    return run


def live(every: float) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorator of a panel that redraws itself every `every` seconds.

    One level only: timed fragments inside timed fragments leave stale content behind. The panel shows the
    age of its own data, so that a frozen one is seen to be old.
    """

    def wrap(body: Callable[P, None]) -> Callable[P, None]:
        return st.fragment(page(body), run_every=every)

    return wrap


def on_script_error(error: Exception) -> bool:
    """`st.App`'s last resort for an error outside every guard."""
    log.error("a page failed outside its guard", exc_info=error)
    st.error(plain(sentence(error)))
    return True
