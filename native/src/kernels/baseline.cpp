#define PHALANX_VARIANT baseline
#include "kernels/kernels.inc"
