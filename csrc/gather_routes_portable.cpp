#define PYRL_KERNELS gather_routes_portable
#define PYRL_BYTES 16
#include "gather_routes_kernels.inc"
