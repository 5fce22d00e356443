"""Where commands that run the engine log to: standard error, without secrets.

structlog's own default prints to standard output, and shows the variables of every
frame of a traceback: tokens and keys among them.
"""

import sys

import structlog


def log_to_stderr(level: int) -> None:
    """Log what is at least of this level (of `logging`) to standard error."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
