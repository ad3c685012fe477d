/* Messages between the drivers at the two ends of a link. */
#ifndef HXA_FAULTY_MESSAGE_H
#define HXA_FAULTY_MESSAGE_H

#include "control.h"
#include "hxa_driver.h"

FAULTY_INTERNAL void faulty_message_send(hxa_link *link, const faulty_message *message);
FAULTY_INTERNAL int faulty_message_receive(hxa_link *link, const void *data, size_t len);

#endif /* HXA_FAULTY_MESSAGE_H */
