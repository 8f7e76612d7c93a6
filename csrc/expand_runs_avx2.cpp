#define PYRL_KERNELS expand_runs_avx2
#define PYRL_LANES 4
#include "expand_runs_kernels.inc"
