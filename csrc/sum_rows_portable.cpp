#define PYRL_KERNELS sum_rows_portable
#include "sum_rows_kernels.inc"
