#define PHALANX_VARIANT avx512
#include "kernels/kernels.inc"
