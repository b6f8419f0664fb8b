/* putget_transport.h is C, stands alone, and has the sizes that callers on both sides count with. */
#include "putget_transport.h"

_Static_assert(sizeof(putget_transport_write) == 48, "a field is in another place");
_Static_assert(offsetof(putget_transport_write, over) == 40, "a field is in another place");
_Static_assert(offsetof(putget_transport, self) == 24, "a field is in another place");
_Static_assert(sizeof(putget_transport) == 32 + 9 * sizeof(void*), "a function is missing");

int main(void) { return 0; }
