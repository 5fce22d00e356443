"""The web application: routes, guard, and errors as problems."""

from importlib.metadata import version
from typing import Any

import structlog
from litestar import Litestar, Response
from litestar.di import Provide
from litestar.exceptions import (
    HTTPException,
    MethodNotAllowedException,
    NotFoundException,
)
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin

from kvport.api import media
from kvport.api.auth import Guard
from kvport.api.bodies import JSON_BODY_BYTES
from kvport.api.errors import (
    BadRequestError,
    MethodNotAllowedError,
    NotFoundError,
)
from kvport.api.handling import Http
from kvport.api.problems import INTERNAL, RETRY_AFTER_SECONDS, Problem
from kvport.api.replies import ClientGoneError
from kvport.api.routes_admin import (
    clear_cache,
    collect_garbage,
    list_namespaces,
    list_pins,
    plan_removal,
    purge_revoked,
    release_pins,
    scrub_progress,
    set_namespace,
    start_scrub,
    stop_scrub,
)
from kvport.api.routes_cache import (
    PATIENCE_SECONDS,
    Imports,
    export_prefix,
    get_artifact,
    import_artifact,
    list_artifacts,
    probe_prefix,
)
from kvport.api.routes_models import list_models, load_model, unload_model
from kvport.api.routes_openai import complete_chat, complete_text
from kvport.api.routes_ops import (
    cache_stats,
    get_schema,
    health,
    metrics,
    nothing_here,
)
from kvport.manifest.errors import KvportError
from kvport.snapshot.errors import TooLargeError
from kvport.snapshot.node import Node

log = structlog.get_logger(__name__)


def create_app(node: Node, *, patience: float = PATIENCE_SECONDS) -> Litestar:
    """The application that serves a node; it neither opens nor closes it.

    Args:
        node: what is served.
        patience: seconds for which an import's client may send nothing.

    Raises:
        KeyFileError: the API key cannot be read.
    """
    imports = Imports(patience)
    return Litestar(
        route_handlers=[
            export_prefix,
            import_artifact,
            probe_prefix,
            cache_stats,
            metrics,
            list_artifacts,
            get_artifact,
            list_namespaces,
            set_namespace,
            plan_removal,
            collect_garbage,
            clear_cache,
            purge_revoked,
            list_pins,
            release_pins,
            scrub_progress,
            start_scrub,
            stop_scrub,
            list_models,
            load_model,
            unload_model,
            complete_chat,
            complete_text,
            health,
            get_schema,
            nothing_here,
        ],
        dependencies={
            "node": Provide(lambda: node, sync_to_thread=False),
            "imports": Provide(lambda: imports, sync_to_thread=False),
        },
        middleware=[Guard(node.keyring.api_key())],
        exception_handlers={
            KvportError: _refused,
            HTTPException: _not_understood,
            ClientGoneError: _nobody_there,
            Exception: _failed,
        },
        request_max_body_size=JSON_BODY_BYTES,
        openapi_config=OpenAPIConfig(
            title="kvport",
            version=version("kvport"),
            use_handler_docstrings=True,
            render_plugins=[JsonRenderPlugin(path="/")],
        ),
        # Ours is set up by the command that serves.
        logging_config=None,
        debug=False,
    )


def _refused(http: Http, error: KvportError) -> Response[Any]:
    return _response(http, Problem.of(error))


def _not_understood(http: Http, error: HTTPException) -> Response[Any]:
    """The framework's own refusals, in our words: its texts repeat what was sent."""
    if isinstance(error, NotFoundException):
        return _refused(http, NotFoundError("nothing is at this address"))
    if isinstance(error, MethodNotAllowedException):
        return _refused(http, MethodNotAllowedError("the address takes another method"))
    if isinstance(error, RequestEntityTooLarge):
        return _refused(http, TooLargeError("the body is above the limit"))
    if error.status_code >= 500:
        log.warning("request_failed", reason=type(error).__name__)
        return _response(http, INTERNAL)
    return _refused(http, BadRequestError("the request is not understood"))


def _nobody_there(_: Http, __: ClientGoneError) -> Response[Any]:
    log.info("client_gone")
    return Response(None, status_code=400)


def _failed(http: Http, error: Exception) -> Response[Any]:
    log.error("request_failed", exc_info=error)
    return _response(http, INTERNAL)


def _response(http: Http, problem: Problem) -> Response[Any]:
    headers = {"cache-control": "no-store"}
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    if problem.status == 408:
        # The rest of the body may come yet: it is not another request.
        headers["connection"] = "close"
    if problem.status == 429:
        headers["retry-after"] = str(RETRY_AFTER_SECONDS)
    return Response(
        problem.at(http.scope["path"]).encode(),
        status_code=problem.status,
        media_type=media.PROBLEM,
        headers=headers,
    )
