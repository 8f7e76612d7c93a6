#define PYRL_KERNELS token_logprob_portable
#define PYRL_LANES 4
#include "token_logprob_kernels.inc"
