"""The server that a command talks to, and the model that it means."""

from kvport.api.cli.errors import ModelNotNamedError
from kvport.api.client import Client


def chosen(client: Client, model: str | None) -> str:
    """The model that was named, or the only one there is.

    Raises:
        ModelNotNamedError: none was named, and the server has not exactly one.
    """
    if model is not None:
        return model
    names = [found.name for found in client.models()]
    if len(names) != 1:
        raise ModelNotNamedError(f"the server has {len(names)} models")
    return names[0]
