"""Are the packages there that make a model? They are big, and nothing else of QLM needs them."""

from __future__ import annotations

from importlib.util import find_spec

from qlm_cli.models.model_folder import ModelNotMade


def need(*modules: str) -> None:
    """Raises ModelNotMade with the names of those that are not installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ModelNotMade(
            f"not installed: {', '.join(missing)}. `make vllm-cpu` makes a virtual environment that has everything (.venv-vllm); "
            "elsewhere: pip install 'qlm-serving[models]'"
        )
