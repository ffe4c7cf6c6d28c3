#define PHALANX_VARIANT baseline
#include "variant.inc"
