"""Sizes of a Hopper streaming multiprocessor and of wgmma. Nothing is imported: any device may ask."""

TILE = 64
"""Rows of wgmma's first operand, and bf16 values in the widest swizzle."""

SMS = 132
"""Streaming multiprocessors of an H100 SXM and an H200. A device with fewer runs the same blocks in more rounds."""

SMEM_BYTES = 222 * 1024
"""Shared memory of a block for rings and operands; the rest of 227 KiB is barriers and scratch."""

FEW_IDS = 8
"""Numbers of a row that are no list yet: the ends that it ignores, of which the sampler's chain has as many."""
