#define PYRL_KERNELS token_logprob_avx512
#define PYRL_LANES 16
#include "token_logprob_kernels.inc"
