#define PHALANX_VARIANT avx512
#include "variant.inc"
