"""Repositories of the Hugging Face hub: files of one commit are downloaded into huggingface_hub's
own cache, where its other users find them, and folders are pushed as one commit.

Errors are sentences that say what to do. Without a connection, a commit that was downloaded before
is used if the cache holds all that is needed of it.
"""

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import httpx2
import huggingface_hub
from huggingface_hub import errors as hub_errors
from huggingface_hub.hf_api import RepoFile

from models.files.address import parse
from models.files.bounds import check_name
from models.files.terminal import first_line

Kind = Literal["model", "dataset"]


@dataclass(frozen=True)
class HubPlace:
    """A folder ("" for all of it) of a repository at a branch, tag or commit."""

    repository: str
    revision: str
    folder: str
    kind: Kind = "model"

    @classmethod
    def parse(cls, url: str, kind: Kind = "model") -> "HubPlace":
        """The place at `hf://organisation/name[@revision][/folder]`; "models/" or "datasets/" may
        come before the organisation.

        Raises:
          ValueError: the URL is of another form, or of the other kind of repository.
        """
        text = parse(url).place
        for other in ("model", "dataset"):
            if text.startswith(f"{other}s/"):
                if other != kind:
                    raise ValueError(f"{url}: is a {other} repository; give a {kind} repository.")
                text = text.removeprefix(f"{other}s/")
        owner, _, rest = text.partition("/")
        named, _, folder = rest.partition("/")
        name, _, revision = named.partition("@")
        if not (owner and name):
            raise ValueError(f"{url}: expected hf://organisation/name, optionally with @revision.")
        return cls(f"{owner}/{name}", unquote(revision) or "main", folder.strip("/"), kind)


def fetch_model(
    url: str,
    choose: Callable[[Mapping[str, int]], list[str]],
    first: tuple[str, Callable[[Path], None]] | None = None,
) -> Path:
    """Downloads the files that `choose` takes from {name: bytes} under a URL, and returns their
    folder; if the URL is that of a file, returns the file. Cached files are not downloaded again.

    Args:
      first: name of a file that is downloaded before the others, if it is among them, and a
        function that is called with it then and may raise.

    Raises:
      FileNotFoundError: no such repository, revision or folder, or the hub cannot be reached and
        the cache lacks something.
      ValueError: a name leads out of the folder, or `choose` raises.
      OSError: access is refused, or a download failed.
    """
    place = HubPlace.parse(url)
    with _errors(url):
        revision, sizes = _tree(place)
        within = f"{place.folder}/" if place.folder else ""
        inside = {n.removeprefix(within): s for n, s in sizes.items() if n.startswith(within)}
        single = place.folder in sizes
        if not (inside or single):
            raise FileNotFoundError(f"{url}: is empty or not there; check the name.")
        for name in inside:
            check_name(f"A file of {url}", name, nested=True)
        names = [place.folder] if single else [within + name for name in choose(inside)]
        fetch = partial(huggingface_hub.snapshot_download, place.repository, revision=revision)
        if first is not None and not single and (early := within + first[0]) in names:
            first[1](Path(fetch(allow_patterns=[glob.escape(early)])) / early)
        snapshot = fetch(allow_patterns=[glob.escape(name) for name in names])
    return Path(snapshot) / place.folder


def push(
    folder: Path,
    names: Sequence[str],
    url: str,
    card: str,
    *,
    kind: Kind,
    private: bool,
    replace: bool,
    revision: str | None = None,
    tag: str | None = None,
) -> str:
    """Pushes files of a folder and a card (README.md) to a repository as one commit; the repository
    is created if need be. Returns its page.

    Args:
      private: for a repository that is created; an existing one stays as it is.
      replace: replaces what the repository holds; without it, a repository that holds something is
        refused.
      revision: branch, created if need be; the URL's if None.
      tag: moved to the new commit.

    Raises:
      ValueError: the URL names a folder in a repository, or one that holds something already.
      OSError: access is refused, or the upload failed; the files are as they were, unless it was
        the tag that could not be moved.
    """
    place, api = HubPlace.parse(url, kind), huggingface_hub.HfApi()
    if place.folder:
        raise ValueError(f"{url}: names a folder; give the repository, hf://organisation/name.")
    branch = revision or place.revision
    about: dict[str, Any] = {"repo_id": place.repository, "repo_type": kind}
    with _errors(url):
        page = api.create_repo(place.repository, repo_type=kind, private=private, exist_ok=True)
        if branch != "main":
            api.create_branch(**about, branch=branch, exist_ok=True)
        held = set(api.list_repo_files(**about, revision=branch)) - {".gitattributes"}
        if held and not replace:
            raise ValueError(
                f"{url} holds {len(held)} files already, such as {min(held)[:80]!r}; choose "
                "another name or --revision, or give --replace to replace them."
            )
        files = [name for name in names if name != "README.md"]
        add = [huggingface_hub.CommitOperationAdd(name, folder / name) for name in files]
        add.append(huggingface_hub.CommitOperationAdd("README.md", card.encode()))
        gone = held - {operation.path_in_repo for operation in add}
        api.create_commit(
            **about,
            operations=[
                *add,
                *(huggingface_hub.CommitOperationDelete(name) for name in sorted(gone)),
            ],
            commit_message=f"Upload {kind} with Chiliad",
            revision=branch,
        )
        if tag is not None:
            if any(ref.name == tag for ref in api.list_repo_refs(**about).tags):
                api.delete_tag(tag=tag, **about)
            api.create_tag(tag=tag, **about, revision=branch)
    return str(page)


def _tree(place: HubPlace) -> tuple[str, dict[str, int]]:
    """The revision, as huggingface_hub resolved it, and all files of its commit with their bytes;
    taken from the cache if the hub cannot be reached."""
    api = huggingface_hub.HfApi()
    revision: str
    try:
        revision = api.resolve_revision(place.repository, revision=place.revision)
        files = api.list_repo_tree(place.repository, recursive=True, revision=revision)
        found = [file for file in files if isinstance(file, RepoFile)]
    except (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError):
        raise
    except Exception as error:
        if isinstance(error, hub_errors.HfHubHTTPError) and error.response.status_code < 500:
            raise
        try:
            found = huggingface_hub.get_cached_repo_tree(place.repository, revision=place.revision)
        except hub_errors.CachedRepoTreeNotFoundError:
            raise FileNotFoundError(
                f"hf://{place.repository}: the hub cannot be reached and nothing of it is cached; "
                "connect, then try again."
            ) from error
        revision = place.revision
    return revision, {file.path: file.size for file in found}


@contextmanager
def _errors(where: str) -> Iterator[None]:
    try:
        yield
    except hub_errors.GatedRepoError:
        raise OSError(
            f"{where}: access needs its owner's approval; request it on the repository's page, "
            "then run `hf auth login`."
        ) from None
    except hub_errors.RepositoryNotFoundError:
        raise FileNotFoundError(
            f"{where}: is not on the hub, or is private; check the name, or run `hf auth login`."
        ) from None
    except hub_errors.RevisionNotFoundError:
        raise FileNotFoundError(
            f"{where}: the repository has no such revision; name a branch, tag or commit of it."
        ) from None
    except (hub_errors.LocalEntryNotFoundError, hub_errors.IncompleteSnapshotError) as error:
        raise FileNotFoundError(
            f"{where}: is not completely cached and the hub cannot be reached; connect, then try "
            "again."
        ) from error
    except hub_errors.HFValidationError as error:
        raise ValueError(f"{where}: {error}") from None
    except hub_errors.HfHubHTTPError as error:
        refused = error.response is not None and error.response.status_code in (401, 403)
        remedy = "run `hf auth login` with a token that permits this" if refused else "try again"
        raise OSError(f"{where}: the hub refused ({first_line(error)}); {remedy}.") from error
    except FileNotFoundError:
        raise
    except (OSError, httpx2.TransportError) as error:
        raise OSError(
            f"{where}: failed ({first_line(error)}); check the connection and try again."
        ) from error
