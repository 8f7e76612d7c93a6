#define PYRL_KERNELS expand_runs_portable
#define PYRL_LANES 2
#include "expand_runs_kernels.inc"
