#define PYRL_KERNELS gather_routes_avx512
#define PYRL_BYTES 64
#include "gather_routes_kernels.inc"
