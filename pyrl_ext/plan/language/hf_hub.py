"""A model of the hub: its config.json, which a plan needs, and why one cannot be fetched."""

from __future__ import annotations

import sys
from functools import cache
from typing import NamedTuple

from pyrl_ext.plan.shipped import shipped_models

CONFIG = "config.json"


class HubConfig(NamedTuple):
    """The config.json of a hub id, or why there is none."""

    path: str = ""
    problem: str = ""


@cache
def config_of(name: str) -> HubConfig:
    """The config.json of the hub id `name`: the one that comes with the package, or else that of
    the hub's cache, or else the hub's, after a line on stderr. Asks for each id once."""
    if shipped := shipped_models().get(name):
        return HubConfig(str(shipped.sizes))
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, CONFIG)
    except ValueError as error:  # no id of the hub has such a name
        return HubConfig(problem=reason(error))
    if isinstance(cached, str):
        return HubConfig(cached)
    if not constants.is_offline_mode():
        what = f"waiting for {CONFIG} of {name} from {constants.ENDPOINT}"
        print(f"{what}. HF_HUB_OFFLINE=1 reads the hub's cache alone", file=sys.stderr, flush=True)
    try:
        return HubConfig(hf_hub_download(name, CONFIG))
    except Exception as error:  # also what its network library raises
        return HubConfig(problem=reason(error))


def reason(error: Exception) -> str:
    """Why something of the hub cannot be had, with the remedy."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "its owner asks for consent, expected a token with it. Give it, and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such model, or not for this token. Correct the id, or set HF_TOKEN"
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error.__cause__, OfflineModeIsEnabled):
        text = "HF_HUB_OFFLINE is set and it is not whole in the hub's cache"
    return f"{text}, expected to reach the hub. Download it elsewhere and name the folder"
