#define PHALANX_VARIANT avx2
#include "kernels/kernels.inc"
