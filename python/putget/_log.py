"""The logger "putget": what was chosen, connected and lost. PUTGET_LOG, or the application, says where to."""

from __future__ import annotations

import logging

from putget import config

logger = logging.getLogger("putget")


def follow_environment() -> None:
    """Writes to stderr from the level of ``PUTGET_LOG`` on, if that is set.

    Raises:
        ValueError: It names no level.
    """
    level = config.log_level()
    if level is None:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s [%(process)d] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False  # a handler of the application would write each line again
