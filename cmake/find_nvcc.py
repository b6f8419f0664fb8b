"""Print the path of the nvcc that the nvidia-cuda-nvcc package put beside this Python, or nothing."""

import os
import sys

for directory in sys.path:
    # CUDA 13's packages share the folder nvidia/cu13, CUDA 12's had nvidia/cuda_nvcc without the libraries.
    nvcc = os.path.join(directory, "nvidia", "cu13", "bin", "nvcc")
    if os.access(nvcc, os.X_OK):
        print(nvcc)
        break
