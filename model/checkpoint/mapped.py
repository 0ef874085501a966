"""MappedRows: a table that stays in its file, of which steps read some rows.

The file is mapped, so that the system keeps in memory what is read often and gives up the rest when
memory is short. Invariant: a row has the numbers that the file's Reader gives, as float32; one that
the Reader would refuse has NaN or infinity, so that the sequence that needs it fails alone. A file
that is replaced by renaming goes on being read; one that is cut short ends the process. It knows
nothing of decoders.
"""

import mmap
from typing import cast

import numpy as np
import torch
from torch import Tensor

from model.checkpoint.files import Stored
from model.checkpoint.gguf.dequantize import QUANTIZED, dequantize
from model.checkpoint.safetensors_file import DTYPES
from model.spec import CheckpointError


class MappedRows:
    """Rows by number of a matrix whose file has been checked. Raises CheckpointError."""

    def __init__(self, stored: Stored) -> None:
        self._kind, (num_rows, self._columns) = stored.dtype, stored.shape
        shape = num_rows, stored.num_bytes // num_rows
        try:
            self._rows_VB = np.memmap(stored.path, np.uint8, "r", stored.begin, shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{stored.path}: cannot be mapped ({error})") from None
        # Rows are read in no order: what lies after one is not wanted.
        cast(mmap.mmap, self._rows_VB.base).madvise(mmap.MADV_RANDOM)

    def __call__(self, ids_T: Tensor) -> Tensor:
        """-> rows_TC, of ids within the table."""
        data_TB = torch.from_numpy(self._rows_VB[ids_T.numpy()])
        if self._kind not in QUANTIZED:
            return data_TB.view(DTYPES[self._kind]).float()
        rows_TC = torch.empty(len(ids_T), self._columns)
        dequantize(self._kind, data_TB, rows_TC)
        return rows_TC
