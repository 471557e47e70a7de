"""Recordings in ALOHA's layout of HDF5, as small as can be."""

from pathlib import Path

import h5py
import numpy as np


def write_aloha(folder: Path) -> Path:
    """Two episodes of four frames in `folder`, which is made."""
    folder.mkdir(parents=True)
    for number in range(2):
        with h5py.File(folder / f"episode_{number}.hdf5", "w") as root:
            root["observations/qpos"] = np.full((4, 14), number, np.float32)
            root["observations/images/top"] = np.full((4, 16, 16, 3), 99, np.uint8)
            root["action"] = np.ones((4, 14), np.float32)
    return folder
