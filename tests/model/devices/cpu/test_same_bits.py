"""One definition of every sum: ids and log-probabilities have the same bits on every processor."""

import pytest

from model.checkpoint.families import read_spec
from model.devices.cpu import native
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from tests.support.conditions import Engine, alone, digest, make_cases, torch_threads
from tests.support.masked import kernels
from tests.support.paths import EMBEDDED

CONTEXT = 256
DIGESTS = {
    ("none", "float32"): "12d3966d9c608977d542e460ba481f784c191bbe16d004be856f82da31015742",
    ("none", "bfloat16"): "c9c17d53573eb8aef4559a94e6b42f9eeb0d6e5fde349ed3767087dea20cf6a5",
    ("int8", "auto"): "232f0e29d987a55f834b4b9768d9391b531acd9e5cf2ae8d098308b3ded0408b",
    ("int4", "auto"): "4b10a6578281cfe33ccb5f534863fc6e68e60a64d8ed39003cc12a01201ccbe2",
}
"""Of twelve requests to the embedded model in each form. Whoever changes what is computed, its
order included, changes these; no processor, compiler or number of threads does. Only processors
without fused operations have bits of their own.
"""


@pytest.mark.parametrize("version", native.FEATURES)
@pytest.mark.parametrize(("quantization", "dtype"), DIGESTS)
def test_every_version_of_the_kernels_gives_the_same_bits(
    quantization: str, dtype: str, version: str
) -> None:
    found = native.library(version)
    if f"kernels_{version}." not in found._name or found.isa() == b"unfused":
        pytest.skip("kernels for other processors, or with other bits")
    options = EngineOptions("cpu", dtype, 1, 16, 600, None, CONTEXT, 64, 512, quantization)
    with torch_threads(2), kernels(version):
        spec = read_spec(EMBEDDED)
        engine = Engine(ModelRunner.load(EMBEDDED, spec, options), CONTEXT)
        cases = make_cases(12, spec.vocab_size, CONTEXT, seed=0)
        (outcome,) = alone(engine, cases, lambda ended: None)
    assert digest(outcome.traces) == DIGESTS[quantization, dtype]
