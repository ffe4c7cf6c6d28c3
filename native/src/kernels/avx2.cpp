#define PHALANX_VARIANT avx2
#include "variant.inc"
