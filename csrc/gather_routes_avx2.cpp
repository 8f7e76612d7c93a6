#define PYRL_KERNELS gather_routes_avx2
#define PYRL_BYTES 32
#include "gather_routes_kernels.inc"
