/* All instances of this process, and through them all links, for commands from Python. */
#ifndef HXA_FAULTY_REGISTRY_H
#define HXA_FAULTY_REGISTRY_H

#include "instance.h"

/* From here on `command` is called for the commands of the instance's control block. */
FAULTY_INTERNAL void faulty_registry_add(hxa_instance *self, faulty_command *command);
FAULTY_INTERNAL void faulty_registry_remove(hxa_instance *self);
FAULTY_INTERNAL void faulty_registry_forked(hxa_instance *self);
FAULTY_INTERNAL void faulty_registry_add_link(hxa_link *link);
FAULTY_INTERNAL void faulty_registry_remove_link(hxa_link *link);
/* The first instance; the lock keeps all of them, and their links, until it is released. */
FAULTY_INTERNAL hxa_instance *faulty_registry_lock(void);
FAULTY_INTERNAL void faulty_registry_unlock(void);

#endif /* HXA_FAULTY_REGISTRY_H */
