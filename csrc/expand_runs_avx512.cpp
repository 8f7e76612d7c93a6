#define PYRL_KERNELS expand_runs_avx512
#define PYRL_LANES 8
#include "expand_runs_kernels.inc"
