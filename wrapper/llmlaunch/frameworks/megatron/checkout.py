"""The checkout of Megatron-LM that a job runs: which script of it trains, whether a recipe or a variable names one, and
whether it is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.findings import Finding, doubtful, host_path, missing, path_state, unseen
from llmlaunch.frameworks.framework_version import CHECKOUT_VARIABLE, checkout_version
from llmlaunch.recipe.types import Recipe

SCRIPT, HYBRID_SCRIPT = "pretrain_gpt.py", "pretrain_hybrid.py"


def shipped_script(recipe: Recipe) -> str:
    """Return the name of Megatron-LM's own script for the recipe's model."""
    return SCRIPT if recipe.model.mamba is None else HYBRID_SCRIPT


def checkout_findings(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with the checkout that the recipe names, or that the variable names where the job is
    submitted."""
    named, variable = recipe.backend.path, environment.get(CHECKOUT_VARIABLE)
    if named is None and not variable:
        if _needs_variable(recipe):
            yield _no_checkout(recipe)
        return
    key: KeyPath = ("backend", "path") if named is not None else ("backend",)
    which = "" if named is not None else f"{CHECKOUT_VARIABLE}="
    checkout, trainer = host_path(recipe, str(named or variable)), shipped_script(recipe)
    state, has_own_script = path_state(checkout), recipe.backend.script is not None
    # what the variable names here need not be what it names in the container
    wrong = missing if named is not None and recipe.container is None else doubtful
    if state == "unseen":
        yield unseen(key, checkout)
    elif state == "absent":
        yield wrong(key, f"{which}{checkout} is not there; name a checkout of Megatron-LM")
    elif not (checkout / "megatron" / "core").is_dir() or not (has_own_script or (checkout / trainer).is_file()):
        above = next((folder for folder in checkout.parents if (folder / trainer).is_file()), None)
        advice = f"name {above}" if above is not None else "name the top folder of a checkout of Megatron-LM"
        yield wrong(
            key, f"{which}{checkout} is no checkout of Megatron-LM: it lacks {trainer} or megatron/core; {advice}"
        )
    elif checkout_version(checkout) is None and recipe.backend.version is None:
        yield doubtful(
            key,
            f"{which}{checkout}: its megatron/core/package_info.py tells no version; name it in backend.version",
        )


def _needs_variable(recipe: Recipe) -> bool:
    """Return whether only a variable where the job is submitted, or an image, can say where Megatron-LM is: the recipe
    names neither a checkout nor a script, exports no variable, and runs no setup lines that might."""
    backend, site = recipe.backend, recipe.cluster.site
    if not backend.traits.has_checkout or backend.path is not None or backend.script is not None:
        return False
    exported = CHECKOUT_VARIABLE in {**recipe.cluster.environment, **recipe.environment}
    return not (exported or recipe.setup or site.setup or site.modules)


def _no_checkout(recipe: Recipe) -> Finding:
    advice = f"set backend.path to a checkout on the cluster, or export {CHECKOUT_VARIABLE}"
    if recipe.container is not None:
        return doubtful(
            ("backend",),
            f"{CHECKOUT_VARIABLE} is not set here: unless the container's image sets it, the job fails at startup, "
            f"since it finds no checkout of Megatron-LM; {advice}",
        )
    return missing(("backend",), f"no checkout of Megatron-LM is named; {advice} where you submit")
