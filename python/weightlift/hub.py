"""Checkpoints on a hub: the files that hold the weights, and no others, into the hub's own cache.

What `*.safetensors` and the like mean is decided on the list of a repository's files, by the rules for local folders.
So `original/` and other subfolders, which hold the weights again in other formats, are never fetched unasked.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from ._logging import logger
from .errors import CheckpointError, CheckpointNotFoundError, CheckpointReadError, printable
from .files import list_names
from .filters import Filter, first_rule
from .index_file import read_index
from .source import OTHER_FORMATS, TORCH_SUFFIXES, CheckpointSource, choose_files, nothing_found

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+")
# A path that ends so was meant for a file here.
_FILE_SUFFIXES = (".json", ".safetensors", *TORCH_SUFFIXES, *OTHER_FORMATS)

# How deep a cached repository is searched.
_MAX_DEPTH = 8
# For the list of a repository's files; `huggingface_hub`'s own for metadata.
_TIMEOUT_SECONDS = 10

# Where a hub can't be asked, the path may as well be mistyped; where it has been, the connection was lost.
_Failure = type[CheckpointNotFoundError] | type[CheckpointReadError]


def download(source: str | os.PathLike[str] | CheckpointSource, *, filters: Sequence[Filter | None] = ()) -> str:
    """Makes sure that the weights of a checkpoint are on this machine.

    Repositories come from the Hugging Face hub by way of `huggingface_hub`, whose settings count (`HF_ENDPOINT`,
    `HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE`); from ModelScope where `WEIGHTLIFT_USE_MODELSCOPE` or, if that is not set,
    `VLLM_USE_MODELSCOPE` is 1 or true. Where the hub cannot be reached, what is in the cache is taken.

    Args:
        source: the id of a repository (`org/name`), or a source with one. Paths are not looked at further.
        filters: as for `locate`. With an index, shards of which no tensor is wanted are not fetched.

    Returns:
        The folder that holds the weights; of a path, the path.

    Raises:
        CheckpointNotFoundError: there is no such repository or revision, or it has no weights; or it is not in the
            cache and the hub cannot be reached.
        CheckpointReadError: the hub refuses, or the connection was lost on the way.
    """
    if not isinstance(source, CheckpointSource):
        source = CheckpointSource(source)
    if not isinstance(source.path, (str, bytes, os.PathLike)):
        raise TypeError(f"expected one path or the id of a repository, found {type(source.path).__name__}")
    path = os.fsdecode(source.path)
    if not isinstance(source.path, str) or os.path.lexists(path) or not _is_id(path):
        return os.path.join(path, source.subfolder) if source.subfolder else path
    repository: _Repository = _ModelScope(source) if _modelscope_is_wanted() else _HuggingFace(source)
    return _fetch(repository, path, source, filters)


def _is_id(path: str) -> bool:
    return _ID.fullmatch(path) is not None and not path.lower().endswith(_FILE_SUFFIXES)


def _modelscope_is_wanted() -> bool:
    wanted = os.environ.get("WEIGHTLIFT_USE_MODELSCOPE") or os.environ.get("VLLM_USE_MODELSCOPE", "")
    return wanted.strip().lower() in ("1", "true")


class _Repository(Protocol):
    """One repository. What the hub's package raises becomes a CheckpointError."""

    def list_files(self) -> list[str]:
        """Paths of all files."""

    def fetch(self, files: Iterable[str]) -> str:
        """Brings these here, and returns the folder to which their paths are relative."""


def _fetch(repository: _Repository, id: str, source: CheckpointSource, filters: Sequence[Filter | None]) -> str:
    subfolder = posixpath.normpath(source.subfolder or ".")
    folder = "" if subfolder == "." else f"{subfolder}/"
    names = [name[len(folder) :] for name in repository.list_files() if name.startswith(folder)]
    names = [name for name in names if "/." not in f"/{name}"]  # hidden ones are none here either
    if folder and not names:
        problem = f"the repository has no folder {source.subfolder!r}"
        raise CheckpointNotFoundError(problem, path=id, reason="NotFound")
    where = f"{id}/{folder}".rstrip("/")
    index, files = choose_files(names, source, where=where)
    if index is not None:
        weight_map = read_index(os.path.join(repository.fetch([folder + index]), folder, index))
        wanted = (file for name, file in weight_map.items() if first_rule(filters, source.prefix + name) is None)
        files = [index, *dict.fromkeys(wanted)]
    elif not files:
        shown = dict.fromkeys(first + slash for first, slash, _ in (name.partition("/") for name in names))
        raise nothing_found(sorted(shown), source, where=where)
    return os.path.join(repository.fetch([folder + file for file in files]), folder).rstrip("/")


class _HuggingFace:
    def __init__(self, source: CheckpointSource) -> None:
        try:
            import huggingface_hub
            import huggingface_hub.constants
            import huggingface_hub.errors
        except ImportError:
            raise CheckpointNotFoundError(
                "no such file or folder; to look for it on the Hugging Face hub, `pip install huggingface_hub`",
                path=str(source.path),
                reason="NotFound",
            ) from None
        self._hub = huggingface_hub
        self._id = str(source.path)
        self._revision = source.revision
        self._where: dict[str, Any] = {
            "repo_id": self._id,
            "revision": source.revision,
            "cache_dir": source.download_dir,
        }

    def list_files(self) -> list[str]:
        with self._explained(CheckpointNotFoundError):
            return self._list_files()

    def _list_files(self) -> list[str]:
        errors = self._hub.errors
        try:
            # Not `list_repo_files`, which tries again for 23 s where there is no network: paths are mistyped there too.
            info = self._hub.HfApi().model_info(self._id, revision=self._revision, timeout=_TIMEOUT_SECONDS)
            return [file.rfilename for file in info.siblings or ()]
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            raise
        except Exception as error:  # of no connection: the HTTP client, and so its exceptions, differ by version
            names = self._list_cached()
            if names is None:
                raise
            if not isinstance(error, errors.OfflineModeIsEnabled):
                logger.warning(
                    "%s: the hub cannot be reached, taking what is in its cache: %s", self._id, _first_line(error)
                )
            return names

    def _list_cached(self) -> list[str] | None:
        """The files as they were listed last; or else those that are in the cache; None: it is not there."""
        errors = self._hub.errors
        try:
            return [file.path for file in self._hub.get_cached_repo_tree(**self._where)]
        except errors.CachedRepoTreeNotFoundError:
            pass
        try:
            folder = self._hub.snapshot_download(**self._where, allow_patterns=[], local_files_only=True)
        except errors.LocalEntryNotFoundError:
            return None
        return list_names(folder, depth=_MAX_DEPTH)

    def fetch(self, files: Iterable[str]) -> str:
        patterns = [glob.escape(file) for file in files]
        with self._explained(CheckpointReadError):
            return str(self._hub.snapshot_download(**self._where, allow_patterns=patterns))

    @contextlib.contextmanager
    def _explained(self, unreachable: _Failure) -> Iterator[None]:
        errors = self._hub.errors
        hub = f"the hub at {self._hub.constants.ENDPOINT}"
        try:
            yield
        except errors.GatedRepoError as error:
            problem = f"access is granted on request: ask for it at {hub}, then log in with `hf auth login`"
            raise CheckpointReadError(problem, path=self._id, reason="HubRefused") from error
        except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
            raise CheckpointNotFoundError(
                f"neither a file or folder here nor a repository of {hub}; check the path, "
                "or log in with `hf auth login` if the repository is private",
                path=self._id,
                reason="NotFound",
            ) from error
        except errors.RevisionNotFoundError as error:
            problem = f"the repository has no revision {self._revision!r}; check its name at {hub}"
            raise CheckpointNotFoundError(problem, path=self._id, reason="NotFound") from error
        except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
            raise CheckpointNotFoundError(
                f"no such file or folder here, and {hub} cannot be reached for what its cache lacks: "
                f"{_first_line(error)}; check the path, or download it while there is a connection",
                path=self._id,
                reason="NotFound",
            ) from error
        except Exception as error:
            raise _failed(hub, self._id, error, unreachable) from error


class _ModelScope:
    def __init__(self, source: CheckpointSource) -> None:
        try:
            api = importlib.import_module("modelscope.hub.api")
            downloads = importlib.import_module("modelscope.hub.snapshot_download")
        except ImportError:
            raise CheckpointNotFoundError(
                "no such file or folder; to look for it on ModelScope, as WEIGHTLIFT_USE_MODELSCOPE or "
                "VLLM_USE_MODELSCOPE asks, `pip install modelscope`",
                path=str(source.path),
                reason="NotFound",
            ) from None
        self._api = api.HubApi()
        self._snapshot_download = downloads.snapshot_download
        self._id = str(source.path)
        self._where: dict[str, Any] = {"revision": source.revision, "cache_dir": source.download_dir}
        self._is_offline = False

    def list_files(self) -> list[str]:
        try:
            files = self._api.get_model_files(self._id, revision=self._where["revision"], recursive=True)
        except Exception as error:  # of no connection: the exceptions differ by version
            try:
                folder = self._snapshot_download(self._id, **self._where, local_files_only=True)
            except Exception:
                raise _failed("ModelScope", self._id, error, CheckpointNotFoundError) from error
            logger.warning(
                "%s: ModelScope cannot be reached, taking what is in its cache: %s", self._id, _first_line(error)
            )
            self._is_offline = True
            return list_names(folder, depth=_MAX_DEPTH)
        return [file["Path"] for file in files if file.get("Type") != "tree"]

    def fetch(self, files: Iterable[str]) -> str:
        wanted = {"allow_patterns": [glob.escape(file) for file in files], "local_files_only": self._is_offline}
        try:
            return str(self._snapshot_download(self._id, **self._where, **wanted))
        except Exception as error:
            raise _failed("ModelScope", self._id, error, CheckpointReadError) from error


def _failed(hub: str, id: str, error: Exception, kind: _Failure) -> CheckpointError:
    return kind(
        f"no such file or folder here, and {hub} did not give it: {type(error).__name__}: {_first_line(error)}; "
        "check the path and the connection",
        path=id,
        reason="HubFailed",
    )


def _first_line(error: Exception) -> str:
    return printable(str(error).partition("\n")[0])
