#define PYRL_KERNELS sum_rows_avx512
#include "sum_rows_kernels.inc"
