"""LoRA without kernels: no rank is taken, so that TGI multiplies adapter by adapter itself."""

MAX_RANK_CUSTOM = 0
BGMV_MAX_RANK = 0


def use_cutlass_shrink(rank):
    return False


def orient_for_rank(weights, rank):
    return weights


def pad_rank(weights, dim, world_size):
    return weights


def get_tmp_tensors(count, rank, device):
    return None, None
