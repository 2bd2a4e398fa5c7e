// All estimators of durations (paper part 2): operators by signature, transfers by link, gaps
// between steps by service, memory margins, contention between devices.
#pragma once

#include "daemon/estimate/contention_estimator.h"
#include "daemon/estimate/gap_estimator.h"
#include "daemon/estimate/memory_estimator.h"
#include "daemon/estimate/op_estimator.h"
#include "daemon/estimate/transfer_estimator.h"
