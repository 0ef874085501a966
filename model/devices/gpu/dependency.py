"""How a kernel begins that may be launched dependently (model.devices.gpu.dependent): device code, no launches."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(DEPENDENT: tl.constexpr):
    """Lets the next launch begin, and waits for the one before. Each program has to, also one that then returns at once: a launch is done
    when all of its programs are, and who waits for it relies on all that came before it.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
