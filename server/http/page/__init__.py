"""Pages for people: the playground at GET /, and the events of GET /monitor that its page map
shows.
"""

from server.http.handlers import Context
from server.http.page.files import file_routes
from server.http.page.monitor import MonitorRoutes
from server.http.routes import Route


def routes(context: Context) -> list[Route]:
    """The routes of this extension; none where server.ui is false."""
    if not context.section.ui:
        return []
    return [*file_routes(), *MonitorRoutes(context).routes()]
