#define PYRL_KERNELS sum_rows_avx2
#include "sum_rows_kernels.inc"
