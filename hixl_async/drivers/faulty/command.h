/* Commands of a plan: releases, breaks, messages.  Python calls them by the address in the control block. */
#ifndef HXA_FAULTY_COMMAND_H
#define HXA_FAULTY_COMMAND_H

#include "control.h"

FAULTY_INTERNAL faulty_command faulty_run_command;

#endif /* HXA_FAULTY_COMMAND_H */
