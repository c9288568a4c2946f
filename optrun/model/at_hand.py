"""Pretrained models that lie in the cache of the hub's client.

So that nothing has to be fetched.
"""

from __future__ import annotations

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound


def models_at_hand(limit: int = 8) -> list[str]:
    """List names of cached models with weights, a configuration and a tokenizer.

    The latest used first.
    """
    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, ValueError):
        return []
    found = []
    for repo in sorted(repos, key=lambda repo: -(repo.last_accessed or 0)):
        names = {file.file_name for revision in repo.revisions for file in revision.files}
        weights = any(name.endswith(".safetensors") for name in names)
        if repo.repo_type == "model" and weights and "config.json" in names:
            found.append(repo.repo_id)
    return found[:limit]
