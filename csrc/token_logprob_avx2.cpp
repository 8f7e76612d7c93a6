#define PYRL_KERNELS token_logprob_avx2
#define PYRL_LANES 8
#include "token_logprob_kernels.inc"
