/* The sockets of trainers: listener.c. Private to control/. */
#pragma once

#include "base/loop/porter.h"
#include "control/control.h"

/* Paces have been paid: accepts again, if that is what it waits for. */
void control_take_turn_of_listener(struct control *control);
/* Who connects is told that it is not taken. */
void control_refuse(int socket, int status, const char *text);
/* Closes a trainer's socket, with all that it holds; takes it over. errand: hears when that is so; or NULL. */
void control_end_socket(int socket, struct porter_errand *errand);
