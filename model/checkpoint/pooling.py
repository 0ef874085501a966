"""What a model makes of a text in place of a next token, as the files of a checkpoint folder say
it: sentence-transformers' modules.json, or the architecture in config.json for `transformers`'
heads for classification.

It knows no families and no torch.
"""

import re
from pathlib import Path

import msgspec

from model.checkpoint.config import Config, short
from model.checkpoint.files import MOST_CONFIG_BYTES, read_text
from model.spec import CheckpointError, PooledLayer, Pooling

MODULES = "modules.json"
LINEAR = ".linear"
"""The name of a linear layer begins with its folder and ends so."""
CLASSIFIES = "ForSequenceClassification"
IN_FILE = "onehead_pooling"
"""Key of the config.json that is made of a GGUF file: the sizes of its linear layers."""
IN_FILE_LAYERS = {n: (f"dense_{n}_feat_in", f"dense_{n}_feat_out") for n in (2, 3)}
"""Their numbers, and the keys of GGUF for them."""
OVER = {"mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
ACTIVATIONS = {"Identity": "none", "Tanh": "tanh"}
PROBLEMS = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}
ONE_OF = "multi_label_classification", "single_label_classification"
"""The kind of problem where a config does not say it, of one label and of several."""
_PLACE = re.compile(r"\d{1,3}_\w{1,99}", re.ASCII)


def pooling_of(folder: Path, config: Config, hidden_size: int) -> Pooling | None:
    """None where the model draws tokens. Raises CheckpointError naming the file and the key that
    does not fit.
    """
    made = config.sub(IN_FILE)
    if made is not None:
        layers = tuple(
            PooledLayer(f"{number}_Dense{LINEAR}", made.columns(inputs), made.columns(outputs))
            for number, (inputs, outputs) in IN_FILE_LAYERS.items()
        )
        return _checked(Pooling("mean", layers), hidden_size, config.path)
    architectures = config.get("architectures")
    if isinstance(architectures, list) and str([*architectures, ""][0]).endswith(CLASSIFIES):
        return _classification(config, hidden_size)
    if not (places := _places(folder)):
        return None
    pooling = Config.read(folder / places[0] / "config.json")
    pooling.only("include_prompt", True, why="onehead pools a text with its prompt")
    layers = tuple(_dense(folder, place) for place in places[1:])
    return _checked(Pooling(_over(pooling), layers), hidden_size, str(folder / MODULES))


def pooled_files(pooling: Pooling | None) -> list[str]:
    """The files of linear layers after pooling, within the folder of safetensors."""
    names = [layer.name for layer in pooling.layers] if pooling else []
    return [
        f"{name.removesuffix(LINEAR)}/model.safetensors" for name in names if name.endswith(LINEAR)
    ]


class Module(msgspec.Struct):
    """A step of what is made of a text, in modules.json. `path`: the folder of its files."""

    type: str
    path: str = ""


def _places(folder: Path) -> list[str]:
    """The folders of what pools and of the linear layers after it; empty where the folder has no
    list of modules.
    """
    path = folder / MODULES
    text = read_text(path, MOST_CONFIG_BYTES)
    if text is None:
        return []
    try:
        modules = msgspec.json.decode(text, type=list[Module])
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected a list of modules with type and path; {error}"
        ) from None
    kinds = [module.type.rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or not _end_well(kinds[2:]):
        raise CheckpointError(
            f"{path}: the modules are {short(kinds)}; expected Transformer, Pooling, any number "
            "of Dense, and Normalize or nothing"
        )
    for module in modules[1:]:
        if not _PLACE.fullmatch(module.path) or (folder / module.path).is_symlink():
            raise CheckpointError(f"{path}: path {short(module.path)} is not a number and a name")
    return [m.path for m, kind in zip(modules, kinds, strict=True) if kind in ("Pooling", "Dense")]


def _end_well(kinds: list[str]) -> bool:
    """Whether modules after pooling are linear layers, and a norm at most as the last one."""
    return {*kinds[:-1]} <= {"Dense"} and {*kinds[-1:]} <= {"Dense", "Normalize"}


def _over(config: Config) -> str:
    """Of older files each kind is a key that is true or false."""
    prefix = "pooling_mode_"
    on = [key for key, value in config.values.items() if key.startswith(prefix) and value is True]
    kind = config.get("pooling_mode") or " and ".join(key.removeprefix(prefix) for key in on)
    if not isinstance(kind, str) or kind not in OVER:
        raise CheckpointError(f"{config.path}: pools by {short(kind)}; expected mean or lasttoken")
    return OVER[kind]


def _dense(folder: Path, place: str) -> PooledLayer:
    config = Config.read(folder / place / "config.json")
    name = str(config.get("activation_function") or "Tanh").rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise config.wrong("activation_function", f"one of {', '.join(ACTIVATIONS)}")
    return PooledLayer(
        f"{place}{LINEAR}",
        config.columns("in_features"),
        config.columns("out_features"),
        config.flag("bias", True),
        ACTIVATIONS[name],
    )


def _classification(config: Config, hidden_size: int) -> Pooling:
    """`score` over the last token's state, as all decoders of `transformers` have it."""
    named = config.sub("id2label")
    if named is None:
        count = config.columns("num_labels", 2)
        labels = [f"LABEL_{number}" for number in range(count)]
    else:
        labels = [named.get(str(number)) for number in range(len(named.values))]
        if not labels or not all(isinstance(label, str) for label in labels):
            raise config.wrong("id2label", 'names by "0", "1" and so on')
    problem = config.get("problem_type") or ONE_OF[len(labels) > 1]
    if not isinstance(problem, str) or problem not in PROBLEMS:
        raise config.wrong("problem_type", f"one of {', '.join(PROBLEMS)}")
    if problem == ONE_OF[1] and len(labels) == 1:
        problem = ONE_OF[0]  # One of one would be certain.
    layers = (PooledLayer("score", hidden_size, len(labels)),)
    return Pooling("last", layers, tuple(labels), PROBLEMS[problem])


def _checked(pooling: Pooling, hidden_size: int, path: str) -> Pooling:
    size = hidden_size
    for layer in pooling.layers:
        if layer.inputs != size:
            raise CheckpointError(
                f"{path}: {layer.name} takes {layer.inputs} numbers, and is given {size}"
            )
        size = layer.outputs
    return pooling
