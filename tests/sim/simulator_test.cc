#include "daemon/sim/simulator.h"
